"""A training under the hooks of each framework that is imported; and two trainings
compared.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

from stepcheck.compare import compare
from stepcheck.errors import SpecificationError, message
from stepcheck.report.difference import Comparison
from stepcheck.trace.matching import Match
from stepcheck.trace.trace import Trace, load

_BACKENDS = "jax", "tensorflow"  # of Keras; on PyTorch its optimizers are not PyTorch's


@contextmanager
def recorded(*models: Any) -> Iterator[Trace]:
    """Run the body of a `with` under hooks; see `stepcheck.record`."""
    frameworks = dict(_imported())
    if not frameworks:
        must, attempt = (
            "A framework must be imported before the training is recorded.",
            "import it",
        )
        raise SpecificationError(
            message(must, "neither keras nor torch", f"{attempt} above.")
        )
    trace = Trace()
    try:
        with ExitStack() as stack:
            for kind, recording in frameworks.items():
                own = [model for model in models if isinstance(model, kind)]
                if own or not models:
                    stack.enter_context(recording(trace, own))
            yield trace
    except BaseException as error:
        trace.failed = type(error).__name__
        raise


def _imported() -> Iterator[
    tuple[type, Callable[[Trace, list], AbstractContextManager]]
]:
    """Yield (the kind of its models, what records them) for each framework that is
    imported.
    """
    if "torch" in sys.modules:
        yield (
            sys.modules["torch"].nn.Module,
            import_module("stepcheck.torch.record").recording,
        )
    keras = sys.modules.get("keras")
    if keras is not None and keras.backend.backend() in _BACKENDS:
        yield keras.Model, import_module("stepcheck.keras.record").recording


def compared(one: Any, two: Any, *, match: Match | None, bits: bool) -> Comparison:
    """Return two traces compared; see `stepcheck.diff`."""
    a, b = (_trace_of(each) for each in (one, two))
    pairs = [*zip(a.runs, b.runs, strict=False)]
    rest = [run.name for run in (*a.runs[len(pairs) :], *b.runs[len(pairs) :])]
    names = sorted(a.versions.keys() & b.versions.keys())
    versions = ((name, a.versions[name], b.versions[name]) for name in names)
    several = len(pairs) > 1
    models = [
        compare(*pair, match=match, bits=bits, is_one_of_several=several)
        for pair in pairs
    ]
    return Comparison(
        tuple(models),
        tuple(rest),
        tuple(each for each in versions if each[1] != each[2]),
    )


def _trace_of(given: Any) -> Trace:
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | os.PathLike):
        return load(given)
    must, attempt = (
        "diff compares two traces.",
        "the trace of `stepcheck.record`, or a path.",
    )
    raise SpecificationError(message(must, type(given).__name__, attempt))
