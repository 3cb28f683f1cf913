"""Loops of one engine under the audit; and the audit's causes as quantities.

echo clip_each_microbatch | python -m corpus.present tensorflow
"""

import ast
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from corpus.loops import BEGINS, Loop, Quantity, named

SEED = 0
_LAST_WORDS = 200  # letters
_OF_STAGE = {
    "rows": (Quantity.ROWS, "UNLIKE"),
    "forward": (Quantity.MODE, "UNLIKE"),
    "gradient": (Quantity.HANDED_GRADIENT, "UNLIKE"),
    "apply": (Quantity.STEP, "UNLIKE"),
    "between": (Quantity.STATE, "UNLIKE"),
    "state": (Quantity.STATE, "UNLIKE"),
    "report": (Quantity.PRINTED, "UNLIKE"),
}
# Quantity and error, and the names of the audit's causes that say so; other names: by their stage.
_OF_NAMES = """
ROWS LEFT_OUT: rows never used
ROWS TWICE: batch trained on twice; rows twice in a pass; batches overlap; drawn with replacement
ROWS ANOTHER_INDEX: same order every pass; same batches every pass; batches of few labels
ROWS ANOTHER_INDEX: shuffle window
ROWS MIXED_WITH_LAST: window carried over the epoch
MODE ANOTHER_FORM: inference mode
MODE ANOTHER_INDEX: inputs swapped; labels among the inputs
LABELS ANOTHER_INDEX: labels shifted; labels of other rows
LABELS UNLIKE: other labels
LABELS ANOTHER_FORM: smoothing missing; smoothing not divided; smoothing twice
WEIGHTS LEFT_OUT: weights ignored
WEIGHTS TWICE: weights squared
WEIGHTS UNLIKE: other weights
WEIGHTS ANOTHER_INDEX: weights of other rows
LOSS_FORM ANOTHER_INDEX: broadcast
LOSS_FORM ANOTHER_FORM: from_logits; softmax twice; other outputs; another loss
LOSS_FORM LEFT_OUT: output left out
LOSS_FORM COUNTED: loss weights ignored; other loss weights
ROW_GRADIENTS COUNTED: padding trained on; mask ignored; mean of means; ascent
ROW_GRADIENTS COUNTED: weights averaged apart
ROW_GRADIENTS COUNTED: summed over microbatches; padding counted; padded places counted
ROW_GRADIENTS COUNTED: divided by a full window
ROW_GRADIENTS COUNTED: divided by the full batch; never divided; summed over replicas
ROW_GRADIENTS COUNTED: divided by the replicas twice
ROW_GRADIENTS COUNTED: divided twice; mean of row means; divided by the weights; divided by the rows
ROW_GRADIENTS COUNTED: rows counted otherwise
ROW_GRADIENTS LEFT_OUT: last window dropped; only the last microbatch; only the first microbatch
ROW_GRADIENTS LEFT_OUT: first microbatch lost; last microbatch lost
PENALTY LEFT_OUT: penalty forgotten
PENALTY COUNTED: penalty once per microbatch; penalty once per replica
PENALTY COUNTED: penalty divided; penalty counted otherwise
PENALTY TWICE: penalty added twice; decayed twice
HANDED_GRADIENT MIXED_WITH_LAST: not reset; momentum by hand; stale gradients
HANDED_GRADIENT ANOTHER_FORM: clip per microbatch; clip before unscale
HANDED_GRADIENT ANOTHER_FORM: clip forgotten; clipped otherwise
HANDED_GRADIENT ANOTHER_FORM: gradient changed
HANDED_GRADIENT ANOTHER_INDEX: gradients swapped
HANDED_GRADIENT COUNTED: loss not scaled; loss scale left in; loss scale frozen in a trace
HANDED_GRADIENT LEFT_OUT: variable left out; frozen variable trained
RATE FROZEN: schedule frozen; rate frozen in a trace
RATE ANOTHER_INDEX: schedule by microbatch; schedule one ahead
STEP TWICE: applied twice; variable updated twice; accumulated twice
STEP LEFT_OUT: optimizer re-created; optimizer state thrown away
STEP COUNTED: steps of zeros
STATE LEFT_OUT: update thrown away; statistics thrown away; seeds thrown away
STATE LEFT_OUT: state of one microbatch; statistics never written back
STATE TWICE: second pass in training mode
"""

# The same of words in the explanation of a difference that no cause reproduces.
_OF_WORDS = {
    "so it is in the loss": (Quantity.LOSS_FORM, "UNLIKE"),
    "has no part in it": (Quantity.ROW_GRADIENTS, "LEFT_OUT"),
    "The learning rate of update": (Quantity.RATE, "UNLIKE"),
}


def _by_name() -> dict[str, tuple[Quantity, str]]:
    found: dict[str, tuple[Quantity, str]] = {}
    for line in _OF_NAMES.strip().splitlines():
        head, names = line.split(": ", 1)
        quantity, error = head.split()
        found |= dict.fromkeys(names.split("; "), (Quantity[quantity], error))
    return found


_BY_NAME = _by_name()


def finding(cause: Any, path: Path) -> dict[str, Any]:
    """Return a cause of the audit as the finding of a row; a line of another file is left out."""
    in_words = (meaning for words, meaning in _OF_WORDS.items() if words in cause.explanation)
    of_rest = next(in_words, _OF_STAGE[cause.stage])
    quantity, error = _BY_NAME.get(cause.name, of_rest)
    line = cause.line
    is_here = line is not None and Path(line.file).name == path.name
    return {
        "stage": quantity.stage,
        "quantity": quantity.name,
        "error": error,
        "number": _rounded(cause.without),
        "line": line.number if is_here else None,
    }


def _rounded(number: float) -> float | None:
    """Return three digits of a number; None if it is infinite or NaN, which JSON has not."""
    return float(f"{number:.3g}") if abs(number) < float("inf") else None


def likely(report: Any) -> list[dict[str, Any]]:
    """Return a finding without a quantity if the report has no cause, but accuses in a note."""
    is_accused = not report.causes and report.has_likely
    nothing = {"stage": "", "quantity": "", "error": "NOTE", "number": None, "line": None}
    return [nothing] if is_accused else []


def watched(loop: Loop) -> dict[str, Any]:
    """Run a loop under the audit, from a file in the current folder; return a row's facts."""
    path = Path(f"{loop.name}.py").absolute()
    path.write_text(loop.source)
    reports: list[Any] = []
    began: list[float] = []

    @contextmanager
    def audited(scope: dict[str, Any]) -> Iterator[None]:
        import wholestep

        audit: Any = wholestep.audit
        call = audit.torch if loop.engine == "torch" else audit
        scope["_audit"] = call
        exec(loop.meant, scope)
        began.append(time.process_time())
        with eval(f"_audit({loop.call})", scope) as report:
            yield
            if loop.printed:
                eval(f"_report.printed({loop.printed})", scope | vars(main) | {"_report": report})
        reports.append(report)

    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    _seed(loop.engine)
    vars(main)["_audited"] = audited
    exec(compile(_with_audit(loop), str(path), "exec"), vars(main))
    (report,) = reports
    findings = [finding(cause, path) for cause in report.causes] + likely(report)
    facts = report.as_json()
    seconds = time.process_time() - began[0]
    return {"findings": findings, "judged": facts["judged"], "seconds": round(seconds, 1)}


def _with_audit(loop: Loop) -> ast.Module:
    """Return the file's code with the loop inside of `with _audited(...)`; line numbers stay."""
    tree = ast.parse(loop.source)
    lines = [line.strip() for line in loop.source.splitlines()]
    marker = lines.index(BEGINS) + 1
    bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
    blocks = [body for body in bodies if isinstance(body, list)]
    later = ((statement.lineno, block, i) for block in blocks for i, statement in enumerate(block))
    _, block, first = min((each for each in later if each[0] > marker), key=lambda each: each[0])
    (under,) = ast.parse("with _audited({**globals(), **locals()}): pass").body
    assert isinstance(under, ast.With)
    for node in ast.walk(under):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = marker
    under.body = block[first:]
    block[first:] = [under]
    return tree


def _seed(engine: str) -> None:
    import numpy as np

    random.seed(SEED)
    np.random.seed(SEED)
    if engine == "torch":
        import torch

        torch.manual_seed(SEED)
    else:
        import keras

        keras.utils.set_random_seed(SEED)


def answer(name: str) -> dict[str, Any]:
    """Return what the audit finds in a loop, which libraries are missing, or the loop's error."""
    loop = named(name)
    missing = [library for library in (loop.engine, *loop.needs) if find_spec(library) is None]
    if missing:
        return {"not_run": f"{', '.join(missing)} not installed"}
    try:
        with restored(loop.engine):
            return watched(loop)
    except (Exception, SystemExit) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:_LAST_WORDS]}


@contextmanager
def restored(engine: str) -> Iterator[None]:
    """Undo what a loop sets for its whole process."""
    main, variables = sys.modules["__main__"], dict(os.environ)
    try:
        with TemporaryDirectory() as folder, chdir(folder):
            yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(variables)
        _restore_torch() if engine == "torch" else _restore_keras()


def _restore_torch() -> None:
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _restore_keras() -> None:
    import keras

    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.saving.get_custom_objects().clear()
    keras.utils.clear_session()


def main(engine: str) -> None:
    """Answer each name on stdin with a line of JSON on stdout, where loops print nothing."""
    os.environ["KERAS_BACKEND"] = "jax" if engine == "torch" else engine
    with os.fdopen(os.dup(1), "w") as answers, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        for line in sys.stdin:
            answers.write(json.dumps(answer(line.strip())) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
