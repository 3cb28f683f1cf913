"""Objects by the names that a script has for them: `net`, `trainer.model`,
`batch["x"]`.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
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
_KINDS = {
    "loss": ("keras:losses.Loss", "torch:nn.modules.loss._Loss"),
    "model": ("keras:Model", "torch:nn.Module"),
    "optimizer": ("keras:optimizers.Optimizer", "torch:optim.Optimizer"),
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
        known = {**self._of_keras(), **scope, "__builtins__": {}}
        found, _ = attempt(
            lambda: {
                argument: eval(code, known) for argument, code in self._codes.items()
            }
        )
        if found is None:  # a name or an item comes later
            return None
        kinds = {type(leaf).__name__ for leaf in tree.leaves(found.get("data"))}
        return None if any(kind.endswith("Tracer") for kind in kinds) else found

    def unknown(self, scope: Scope) -> Iterator[tuple[str, str, list[str]]]:
        """Yield (argument, name, names near it) for each that has no value."""
        known = {**self._of_keras(), **scope}
        for argument, code in self._codes.items():
            _, error = attempt(partial(eval, code, {**known, "__builtins__": {}}))
            if error is not None:
                name = getattr(error, "name", None) or self.texts[argument]
                owner = getattr(error, "obj", None)
                yield (
                    argument,
                    name,
                    get_close_matches(name, known if owner is None else dir(owner)),
                )

    def are_written(self, text: str) -> bool:
        """Whether a source has all names, so that they may get values later."""
        names = {name for code in self._codes.values() for name in code.co_names}
        return all(name in text for name in names - {*self._of_keras()})

    def _of_keras(self) -> dict[str, str]:
        """Return the stated loss by name, if Keras has it."""
        text = self.texts.get("loss", "")
        try:
            return {text: text} if sys.modules["keras"].losses.get(text) else {}
        except (KeyError, TypeError, ValueError):
            return {}


def _parsed(argument: str, text: str) -> ast.Expression:
    must = f"--{argument} must be a name of the script, with dots and brackets."
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise SpecificationError(
            message(must, text, "net, trainer.model or batch['x'].")
        ) from error
    parts = [node for node in ast.walk(parsed.body) if isinstance(node, ast.expr)]
    if not all(isinstance(node, _PLAIN) for node in parts):
        raise SpecificationError(message(must, text, "give it a name in the script."))
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
    """Return models, arrays, losses and optimizers by name, for each option of the
    command.

    >>> import numpy as np
    >>> [*seen({"x": np.ones(3), "batch": {"y": np.ones(3)}, "num": 3})["data"]]
    ['x', "batch['y']"]
    """
    found: dict[str, dict[str, Any]] = {
        "model": {},
        "data": {},
        "loss": {},
        "optimizer": {},
    }
    classes = {
        kind: tuple(filter(None, map(imported, places)))
        for kind, places in _KINDS.items()
    }
    known = set[int]()
    for name, value in _with_parts(scope):
        kind = next(
            (kind for kind, own in classes.items() if isinstance(value, own)), "data"
        )
        is_array = hasattr(value, "__array__") and len(
            getattr(value, "shape", None) or ()
        )
        if (kind != "data" or is_array) and id(value) not in known:
            known.add(id(value))
            found[kind][name] = value
    return found


def _with_parts(scope: Scope) -> Iterable[tuple[str, Any]]:
    """Return (name, object) of a scope, then of the attributes and items of its
    objects.
    """
    public = {name: value for name, value in scope.items() if not name.startswith("_")}
    parts = dict(public)
    for name, value in public.items():
        home = type(value).__module__
        file = getattr(sys.modules.get(home), "__file__", None)
        if isinstance(value, dict):
            parts |= {f"{name}[{key!r}]": each for key, each in value.items()}
        elif home == "__main__" or (file is not None and is_of_user(file)):
            own = getattr(value, "__dict__", {})
            parts |= {f"{name}.{key}": each for key, each in own.items()}
    return parts.items()
