"""The parts that both engines share: clipped gradients, and programs under `run_eagerly`."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from keras.optimizers import LossScaleOptimizer, Optimizer

from wholestep.engines.protocol import Compiled, Found, Function
from wholestep.keras_private import clip_gradients
from wholestep.tree import Tree

_HOW = (
    "Nothing is compiled: the model says run_eagerly=True, and Python computes operation by "
    "operation."
)


def clip(optimizer: Optimizer, grads: list) -> list:
    """Return the gradients as this optimizer clips them."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    return clip_gradients(inner)(grads)


class EagerPrograms:
    """The part `programs` of an engine that compiles nothing.

    Args:
        undone: makes a context that restores the variables which a custom step assigns.
    """

    is_eager = True
    always_xla = loops_once = False
    why_no_xla = ""

    def __init__(self, undone: Callable[[], AbstractContextManager]):
        self._undone = undone

    def compile(
        self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False
    ) -> Compiled:
        """Return the function unchanged; run again, it would repeat its prints."""
        return Compiled(function, how=_HOW)

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Return True: each update is a separate dispatch."""
        return True

    def traced(self, function: Function) -> Function:
        """Return the function unchanged."""
        return function

    inlined = traced

    def shapes(self, function: Callable[..., Found], *arguments: Tree) -> Found:
        """Return the function's results: without a trace, only they show the shapes and dtypes."""
        with self._undone():
            return function(*arguments)
