"""Former names, of the package stepcheck: `ws.audit`, `ws.audit.torch` and `wholestep audit`."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from wholestep.errors import SpecificationError, message, pip_install


class Audit:
    """`ws.audit` and `ws.audit.torch`, which are `stepcheck.watch`."""

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        """Return `stepcheck.watch` of the arguments."""
        return _stepcheck("").watch(*arguments, **others)

    torch = __call__


audit = Audit()


def command(arguments: list[str]) -> int:
    """Run `stepcheck run` with these arguments, and return its exit code."""
    return _stepcheck(".cli").main(["run", *arguments])


def _stepcheck(module: str) -> ModuleType:
    # in the folder of a clone, `stepcheck` is found as a folder of no package: without an origin
    if getattr(find_spec("stepcheck"), "origin", None) is None:
        must = "The check of training loops is the package stepcheck."
        attempt = f"{pip_install('stepcheck[keras]')}."
        raise SpecificationError(message(must, "none installed", attempt))
    return import_module(f"stepcheck{module}")
