"""Programs on TensorFlow: traced functions, which XLA compiles where it is faster."""

from collections.abc import Callable

import keras
import tensorflow as tf

from wholestep.engines.strategy import Replicas
from wholestep.engines.tensorflow_leaves import spec_of, why_not_for_xla
from wholestep.engines.xla import FlatCall, choose_xla, holds_unknown_lists, is_not_for_xla
from wholestep.errors import warn
from wholestep.tree import Tree

_UNKNOWN_LISTS = "XLA cannot compile it (the gradient of a loop makes lists whose length is not known)"


class TensorflowPrograms:
    """The methods of `wholestep.engines.protocol` for programs.

    Args:
        model: the model, whose layers and `compile` may rule out XLA; None if there is none.
        replicas: the replicas that share the rows of a batch; None if there is only one.
        jit_compile: whether the user wants XLA; "auto" leaves the choice to the program.
    """

    def __init__(self, model: keras.Model | None, replicas: Replicas | None, jit_compile: bool | str):
        self.replicas = replicas
        self.compilations = 0
        self.always_xla, self.why_no_xla = choose_xla(model, jit_compile)
        self._with_xla: list = []

    @property
    def loops_once(self) -> bool:
        """Whether single updates are compiled as a loop: XLA compiles loops only."""
        return self.always_xla

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Compile the function for arguments such as `examples`; with XLA if it repeats a step many times.

        XLA takes seconds to compile and then halves the time of small steps. The choice depends on the program alone,
        never on a measurement: the same program must give the same bits again.

        Args:
            repeats: whether the last argument is the number of repetitions of a step. It is 0 in `examples`, so that a
                call with them only compiles.
        """
        self.compilations += 1
        specs = specs_of(examples)
        graph = tf.function(function, autograph=False).get_concrete_function(*specs)
        if self.replicas is not None:
            return graph
        if not repeats or self.why_no_xla:
            return FlatCall(graph)
        if why := why_not_for_xla(specs):
            return self._without_xla(graph, why)
        if holds_unknown_lists(graph):
            return self._without_xla(graph, _UNKNOWN_LISTS)
        if not self.always_xla and is_not_for_xla(graph):
            return FlatCall(graph)
        try:
            again = tf.function(lambda *given: graph(*given), autograph=False, jit_compile=True)  # not traced anew
            compiled = again.get_concrete_function(*specs)
            compiled(*examples)
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            why = f"XLA cannot compile it ({str(error).strip().splitlines()[0][:160]})"
            return self._without_xla(graph, why)
        self._with_xla.append(FlatCall(compiled))
        return self._with_xla[-1]

    def _without_xla(self, graph: tf.types.experimental.ConcreteFunction, why: str) -> FlatCall:
        self.why_no_xla = why
        if self.always_xla:
            warn(f"jit_compile=True has no effect: {why}.")
        return FlatCall(graph)

    def again(self, program: Callable) -> Callable | None:
        """Return None: reads of variables are not reported, so updates are never sent ahead."""
        return None

    def describe(self, program: Callable) -> str:
        """Return how a program is executed, as text."""
        if any(program is compiled for compiled in self._with_xla):
            return "XLA compiles it."
        return f"TensorFlow runs it without XLA: {self.why_no_xla}." if self.why_no_xla else ""

    def memory(self, program: Callable) -> int | None:
        """Return None: TensorFlow does not report a program's memory before it runs."""
        return None

    def device_bytes(self) -> int | None:
        """Return None: the device's memory is not known."""
        return None

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Return False: no function is known to be slower inside a compiled loop."""
        return False


def specs_of(arguments: Tree) -> Tree:
    """Return the shapes and dtypes of a program's arguments."""
    return tf.nest.map_structure(spec_of, arguments)
