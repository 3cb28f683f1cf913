"""Objects by the names that a script has for them: `net`, `trainer.model`, `batch["x"]`."""

import ast
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

from stepcheck import tree
from stepcheck.errors import SpecificationError, message

_OF_NAMES = ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.UnaryOp
_KINDS = {
    "loss": ("keras.losses.Loss", "torch.nn.modules.loss._Loss"),
    "model": ("keras.Model", "torch.nn.Module"),
    "optimizer": ("keras.optimizers.Optimizer", "torch.optim.Optimizer"),
}
_TRACERS = ("jax.core.Tracer",)
_MOST_NAMES = 8
Scope = Mapping[str, Any]


class Names:
    """What is stated by name, for each argument of `stepcheck.watch`.

    Raises:
        SpecificationError: an expression has more than names, attributes and items.
    """

    def __init__(self, texts: Mapping[str, str]):
        self.texts = texts
        self._codes = {argument: _compiled(argument, text) for argument, text in texts.items()}

    def values(self, scope: Scope) -> dict[str, Any] | None:
        """Return the objects by argument; None where a name has no value, or is the placeholder of a trace."""
        try:
            found = {argument: self._value(argument, scope) for argument in self.texts}
        except Exception:  # a name or an item that comes later
            return None
        are_traced = (is_a(leaf, _TRACERS) for leaf in tree.leaves(found.get("data")))
        return None if any(are_traced) else found

    def _value(self, argument: str, scope: Scope) -> Any:
        text = self.texts[argument]
        if argument == "loss" and text not in scope and is_loss_of_keras(text):
            return text
        return eval(self._codes[argument], {**scope, "__builtins__": {}})

    def missing(self, known: set[str]) -> Iterator[str]:
        """Yield the message for each argument whose name is not one of the script's."""
        for argument, code in self._codes.items():
            (first, *_) = code.co_names or ("",)
            if first in known or (argument == "loss" and is_loss_of_keras(first)):
                continue
            near = ", ".join(get_close_matches(first, sorted(known), _MOST_NAMES)) or "a name of the script"
            must = f"--{argument} must have a value in one of the script's functions, or in its module."
            yield message(must, self.texts[argument], f"{near}.")


def _compiled(argument: str, text: str) -> CodeType:
    must = f"--{argument} must be a name of the script, with dots and brackets."
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise SpecificationError(message(must, text, "net, trainer.model or batch['x'].")) from error
    parts = (node for node in ast.walk(parsed.body) if isinstance(node, ast.expr))
    if not all(isinstance(node, _OF_NAMES) for node in parts):
        raise SpecificationError(message(must, text, "give the object a name in the script."))
    return compile(parsed, f"--{argument}", "eval")


def is_loss_of_keras(text: str) -> bool:
    """Whether Keras has a loss of this name."""
    try:
        return "keras" in sys.modules and bool(sys.modules["keras"].losses.get(text))
    except (TypeError, ValueError):
        return False


def is_a(value: Any, places: tuple[str, ...]) -> bool:
    """Whether a value is of one of these classes, of modules that the script has imported."""
    split = (place.split(".", 1) for place in places)
    classes = (attrgetter(name)(sys.modules[home]) for home, name in split if home in sys.modules)
    return any(isinstance(value, each) for each in classes)


def kinds_of(scope: Scope) -> Iterator[tuple[str, str, int]]:
    """Yield (argument, name, rows) for each object that may be named; rows: of an array, else 0."""
    for name, value in scope.items():
        kind = next((kind for kind, places in _KINDS.items() if is_a(value, places)), "")
        if isinstance(value, FunctionType) and "loss" in name:
            kind = "loss"
        shape = () if kind or isinstance(value, type) else getattr(value, "shape", ())
        if kind and not name.startswith("_"):
            yield kind, name, 0
        elif isinstance(shape, tuple) and shape and hasattr(value, "__array__"):
            yield "data", name, int(shape[0])


def advice(script: str, stated: Mapping[str, str], seen: Mapping[str, Mapping[str, int]]) -> str:
    """Return the command to run, filled in with what was seen, and all that may stand there."""
    rows = seen.get("data", {})
    most = max(rows.values(), default=0)
    first = {kind: next(iter(names)) for kind, names in seen.items() if kind != "optimizer" and names}
    first |= {"data": ",".join([name for name, num in rows.items() if num == most][:2])} if rows else {}
    first = {"model": "NET", "data": "X,Y", "loss": "LOSS"} | first | dict(stated)
    command = " ".join([f"stepcheck run {script}", *(f"--{kind} {name}" for kind, name in first.items())])
    every = {kind: ", ".join([*names][:_MOST_NAMES]) for kind, names in seen.items() if names}
    return "\n".join([command, *(f"  --{kind}: {names}" for kind, names in every.items())])
