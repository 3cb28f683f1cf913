"""Objects by the names that a script has for them: `net`, `trainer.model`,
`batch["x"]`.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message
from stepcheck.user_code.source import is_of_user

_PLAIN = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Constant,
    ast.Tuple,
    ast.UnaryOp,
)
_KINDS = {  # classes of Keras and PyTorch, by name
    "model": {"Model", "Module"},
    "data": {"Dataset"},
    "loss": {"Loss", "_Loss"},
    "optimizer": {"Optimizer"},
}
Scope = Mapping[str, Any]


class Names:
    """The objects that are stated by name, by argument of `stepcheck.watch`.

    A loss may be named as Keras does.

    Raises:
        SpecificationError: an expression has more than names, attributes and items.
    """

    def __init__(self, texts: Mapping[str, str]):
        self.texts = texts
        self._codes = {
            argument: compile(_parsed(argument, text), "names", "eval")
            for argument, text in texts.items()
        }

    def values(self, scope: Scope) -> dict[str, Any] | None:
        """Return the objects by argument; None where one is not known, or has no
        numbers yet.
        """
        found: dict[str, Any] = {}
        for argument in self._codes:
            found[argument], error = self._value(argument, scope)
            if error is not None:  # a name or an item comes later
                return None
        leaves = tree.leaves(found.get("data"))
        are_traced = any(
            type(leaf).__name__.endswith("Tracer") for leaf in leaves
        )
        return None if are_traced else found

    def unknown(self, scope: Scope) -> Iterator[tuple[str, str, list[str]]]:
        """Yield (argument, name, names near it) for each that has no value."""
        for argument, text in self.texts.items():
            _, error = self._value(argument, scope)
            if error is not None:
                name = getattr(error, "name", None) or text
                owner = getattr(error, "obj", None)
                known = scope if owner is None else dir(owner)
                yield argument, name, get_close_matches(name, known)

    def _value(
        self, argument: str, scope: Scope
    ) -> tuple[Any, Exception | None]:
        known = {**self._of_keras(), **scope, "__builtins__": {}}
        return attempt(lambda: eval(self._codes[argument], known))

    def are_written(self, text: str) -> bool:
        """Whether a source has all names, so that they may get values later."""
        names = {
            name for code in self._codes.values() for name in code.co_names
        }
        return all(name in text for name in names - {*self._of_keras()})

    def _of_keras(self) -> dict[str, str]:
        """Return the stated loss by name, if Keras has it."""
        text = self.texts.get("loss", "")
        found, _ = attempt(lambda: sys.modules["keras"].losses.get(text))
        return {text: text} if found else {}


def _parsed(argument: str, text: str) -> ast.Expression:
    must = f"--{argument} must be a name of the script, with dots and brackets."
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise SpecificationError(
            message(must, text, "net, trainer.model or batch['x'].")
        ) from error
    parts = [
        node for node in ast.walk(parsed.body) if isinstance(node, ast.expr)
    ]
    if not all(isinstance(node, _PLAIN) for node in parts):
        raise SpecificationError(
            message(must, text, "give it a name in the script.")
        )
    return parsed


def imported(place: str) -> Any:
    """Return the object `module:name`; None if the module was not imported."""
    home, name = place.split(":")
    module = sys.modules.get(home)
    is_ready = module is not None and not getattr(
        module.__spec__, "_initializing", False
    )
    return attrgetter(name)(module) if is_ready else None


def seen(scope: Scope) -> dict[str, dict[str, Any]]:
    """Return models, arrays and data sets, losses and optimizers by name, for each
    option of the command: of a scope, and attributes of its objects.

    >>> import numpy as np
    >>> [*seen({"x": np.ones(3), "num": 3})["data"]]
    ['x']
    """
    named = {
        name: value for name, value in scope.items() if not name.startswith("_")
    }
    for name, value in [*named.items()]:
        home = type(value).__module__
        file = getattr(sys.modules.get(home), "__file__", None)
        if home == "__main__" or (file and is_of_user(file)):
            parts = getattr(value, "__dict__", {})
            named |= {f"{name}.{key}": own for key, own in parts.items()}
    found = {kind: dict[str, Any]() for kind in _KINDS}
    known = set[int]()
    for name, value in named.items():
        bases = {base.__name__ for base in type(value).__mro__}
        kinds = [kind for kind, classes in _KINDS.items() if bases & classes]
        if hasattr(value, "__array__") and getattr(value, "shape", None):
            kinds = ["data"]
        if kinds and id(value) not in known:
            known.add(id(value))
            found[kinds[-1]][name] = value
    return found
