"""Objects by the names that a script has for them: `net`, `trainer.model`, `batch["x"]`."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from operator import attrgetter
from typing import Any

from stepcheck import tree
from stepcheck.errors import SpecificationError, attempt, message

_PLAIN = ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.UnaryOp
_KINDS = {
    "loss": ("keras:losses.Loss", "torch:nn.modules.loss._Loss"),
    "model": ("keras:Model", "torch:nn.Module"),
    "optimizer": ("keras:optimizers.Optimizer", "torch:optim.Optimizer"),
}
_MOST_NAMES = 8  # of a kind, in a message
Scope = Mapping[str, Any]


class Names:
    """The objects that are stated by name, by argument of `stepcheck.watch`; a loss may be named as Keras does.

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
        """Return the objects by argument; None where a name has no value, or one without numbers as in a trace."""
        own = {**self._of_keras(), **scope, "__builtins__": {}}
        found, _ = attempt(
            lambda: {argument: eval(code, own) for argument, code in self._codes.items()}
        )
        if found is None:  # a name or an item comes later
            return None
        kinds = {type(leaf).__name__ for leaf in tree.leaves(found.get("data"))}
        return None if any(kind.endswith("Tracer") for kind in kinds) else found

    def _of_keras(self) -> dict[str, str]:
        """Return the stated loss by name, if Keras has it."""
        text = self.texts.get("loss", "")
        try:
            return {text: text} if sys.modules["keras"].losses.get(text) else {}
        except (KeyError, TypeError, ValueError):
            return {}

    def missing(self, known: set[str]) -> Iterator[str]:
        """Yield a message for each name that is none of these."""
        for argument, code in self._codes.items():
            for name in {*code.co_names[:1]} - known - {*self._of_keras()}:
                near = ", ".join(get_close_matches(name, known)) or "a name of the script"
                must = f"--{argument} must be known in one of the script's functions, or in its module."
                yield message(must, name, f"{near}.")


def _parsed(argument: str, text: str) -> ast.Expression:
    must = f"--{argument} must be a name of the script, with dots and brackets."
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise SpecificationError(
            message(must, text, "net, trainer.model or batch['x'].")
        ) from error
    if not all(
        isinstance(node, _PLAIN) for node in ast.walk(parsed.body) if isinstance(node, ast.expr)
    ):
        raise SpecificationError(message(must, text, "give it a name in the script."))
    return parsed


def imported(place: str) -> Any:
    """Return what `module:name` names; None if the module was not imported."""
    home, name = place.split(":")
    module = sys.modules.get(home)
    is_ready = module is not None and not getattr(module.__spec__, "_initializing", False)
    return attrgetter(name)(module) if is_ready else None


def _kinds_of(scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield (argument, name) for the models, losses, optimizers and arrays of a scope."""
    classes = {kind: tuple(filter(None, map(imported, places))) for kind, places in _KINDS.items()}
    for name, value in scope.items():
        kind = next((kind for kind, own in classes.items() if isinstance(value, own)), "data")
        is_array = hasattr(value, "__array__") and len(getattr(value, "shape", None) or ())
        if not name.startswith("_") and (kind != "data" or is_array):
            yield kind, name


def advice(script: str, stated: Mapping[str, str], scopes: Iterable[Scope]) -> str:
    """Return the command to run, filled in with all names of each kind.

    >>> advice("train.py", {"loss": "mse"}, [])
    'stepcheck run train.py --model NET --data X,Y --loss mse'
    """
    seen: dict[str, dict[str, None]] = {}
    for kind, name in chain.from_iterable(map(_kinds_of, scopes)):
        seen.setdefault(kind, {})[name] = None
    found = {kind: "|".join([*names][:_MOST_NAMES]) for kind, names in seen.items()}
    every = {"model": "NET", "data": "X,Y", "loss": "LOSS"} | found | {**stated}
    return " ".join(
        [f"stepcheck run {script}", *(f"--{kind} {name}" for kind, name in every.items())]
    )
