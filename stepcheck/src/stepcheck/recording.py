"""A training under the hooks of each framework that is imported; and two trainings
compared.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from stepcheck.compare import compare
from stepcheck.errors import SpecificationError, message
from stepcheck.report.difference import Comparison
from stepcheck.trace.matching import Match
from stepcheck.trace.trace import Trace, load

# of Keras; on PyTorch its optimizers are not PyTorch's
_BACKENDS = (
    "jax",
    "tensorflow",
)


@contextmanager
def recorded(*models: Any) -> Iterator[Trace]:
    """Run the body of a `with` under hooks; see `stepcheck.record`."""
    kinds = {}  # of models, by the room that records them
    if "torch" in sys.modules:
        kinds["torch"] = sys.modules["torch"].nn.Module
    keras = sys.modules.get("keras")
    if keras is not None and keras.backend.backend() in _BACKENDS:
        kinds["keras"] = keras.Model
    if not kinds:
        must = "A framework must be imported before the training is recorded."
        received = "neither keras nor torch"
        raise SpecificationError(message(must, received, "import it above."))
    trace = Trace()
    try:
        with ExitStack() as stack:
            for room, kind in kinds.items():
                own = [model for model in models if isinstance(model, kind)]
                if own or not models:
                    record = import_module(f"stepcheck.{room}.record")
                    stack.enter_context(record.recording(trace, own))
            yield trace
    except BaseException as error:
        trace.failed = type(error).__name__
        raise


def compared(
    one: Any, two: Any, *, match: Match | None, bits: bool
) -> Comparison:
    """Return two traces compared; see `stepcheck.diff`."""
    a, b = _trace_of(one), _trace_of(two)
    num = min(len(a.runs), len(b.runs))
    options: dict[str, Any] = {
        "match": match,
        "bits": bits,
        "is_one_of_several": num > 1,
    }
    models = [
        compare(*pair, **options) for pair in zip(a.runs, b.runs, strict=False)
    ]
    rest = [run.name for run in (*a.runs[num:], *b.runs[num:])]
    names = sorted(a.versions.keys() & b.versions.keys())
    versions = [(name, a.versions[name], b.versions[name]) for name in names]
    others = [each for each in versions if each[1] != each[2]]
    return Comparison(tuple(models), tuple(rest), tuple(others))


def _trace_of(given: Any) -> Trace:
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | os.PathLike):
        return load(given)
    must, advice = (
        "diff compares two traces.",
        "the trace of `record`, or a path.",
    )
    raise SpecificationError(message(must, type(given).__name__, advice))
