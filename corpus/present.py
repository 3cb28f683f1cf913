"""Loops of one engine under stepcheck, as rows of the table.

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

from corpus.loops import BEGINS, Loop, named

SEED = 0
_LAST_WORDS = 200  # letters


def finding(found: Any, path: Path) -> dict[str, Any]:
    """Return a finding as that of a row; a line of another file is left out."""
    line = found.where.line
    is_here = line is not None and Path(line.file).name == path.name
    return {
        "stage": str(found.stage),
        "quantity": found.quantity.name,
        "error": found.error.name,
        "number": _rounded(found.apart),
        "line": line.number if is_here else None,
    }


def _rounded(number: float) -> float | None:
    """Return three digits of a number; None if it is infinite or NaN, which JSON has not."""
    return float(f"{number:.3g}") if abs(number) < float("inf") else None


def watched(loop: Loop) -> dict[str, Any]:
    """Run a loop under the audit, from a file in the current folder; return a row's facts."""
    path = Path(f"{loop.name}.py").absolute()
    path.write_text(loop.source)
    reports: list[Any] = []
    began: list[float] = []

    @contextmanager
    def audited(scope: dict[str, Any]) -> Iterator[None]:
        import stepcheck

        scope["_audit"] = stepcheck.watch
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
    findings = [finding(found, path) for found in report.findings]
    facts = report.as_json()
    if facts["failures"]:
        raise AssertionError(facts["failures"])
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
    main = sys.modules["__main__"]
    variables = dict(os.environ)
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
