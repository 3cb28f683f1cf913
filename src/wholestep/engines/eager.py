"""What an engine does under `run_eagerly`: functions are called with values, and nothing is traced or compiled."""

from collections.abc import Callable

from wholestep.tree import Tree


class Eager:
    """The verbs of `wholestep.engines.protocol` that would trace or compile; an engine has these before its own."""

    is_eager = True
    loops_once = False

    def traced(self, function: Callable) -> Callable:
        """Return the function as it is."""
        return function

    def inlined(self, function: Callable) -> Callable:
        """Return the function as it is."""
        return function

    def shapes(self, function: Callable, *arguments: Tree) -> Tree:
        """Return what the function returns, which has the shapes and dtypes: there is no other way to know them."""
        return function(*arguments)

    def compile(self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False) -> Callable:
        """Return the function as it is."""
        return function

    def again(self, program: Callable) -> Callable | None:
        """Return None: whoever prints what it sees is to see every update once."""
        return None

    def describe(self, program: Callable) -> str:
        """Return how a program is carried out, in plain words."""
        return "Nothing is compiled: the model says run_eagerly=True, and Python computes operation by operation."

    def memory(self, program: Callable) -> int | None:
        """Return None: nobody can tell beforehand."""
        return None

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """Return True: each update is a dispatch of its own."""
        return True
