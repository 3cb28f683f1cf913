"""Engine methods under `run_eagerly`: functions are called with values, and nothing is traced or compiled."""

from collections.abc import Callable

from wholestep.tree import Tree


class Eager:
    """The methods of `wholestep.engines.protocol` that would trace or compile; listed first among an engine's bases."""

    is_eager = True
    loops_once = False

    def traced(self, function: Callable) -> Callable:
        """Return the function unchanged."""
        return function

    def inlined(self, function: Callable) -> Callable:
        """Return the function unchanged."""
        return function

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return the function's results: without a trace, only they show the shapes and dtypes."""
        return function(*arguments)

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Return the function unchanged."""
        return function

    def again(self, program: Callable) -> Callable | None:
        """Return None: a program that runs again would repeat its prints."""
        return None

    def describe(self, program: Callable) -> str:
        """Return how a program is executed, as text."""
        return "Nothing is compiled: the model says run_eagerly=True, and Python computes operation by operation."

    def memory(self, program: Callable) -> int | None:
        """Return None: the memory is not known in advance."""
        return None

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Return True: each update is a separate dispatch."""
        return True
