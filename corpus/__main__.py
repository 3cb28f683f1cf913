"""The command: run loops of the corpus under the audit, and write a line for each.

python -m corpus [PATTERN ...] [--engine jax] [--check] [--write] [--page]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from corpus.loops import ENGINES, FOLDER, Loop, loops
from corpus.table import TABLE, Row, load, page, row, save, worse

ROOT = FOLDER.parent
PAGE = ROOT / "docs" / "corpus.md"
LONGEST = 600  # seconds
_LAST_WORDS = 200  # letters
# With more threads, those of PyTorch that wait count as seconds of the processor.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
_FLAGS = {
    "check": f"compare with {TABLE.name}; fail if it is worse",
    "write": f"write the rows into {TABLE.name}",
    "page": "write docs/corpus.md from the table, and run nothing",
}


def environment(loop: Loop) -> str:
    """Return the folder of a loop's virtual environment, which the Makefile makes."""
    of_torch = ".venv-trainers" if loop.needs else ".venv-torch"
    return of_torch if loop.engine == "torch" else ".venv"


def run(loop: Loop) -> Row:
    """Return the row of a loop, run in a process of its own."""
    python = ROOT / environment(loop) / "bin" / "python"
    if not loop.is_stated:
        return row(loop, {"not_run": "its intention cannot be stated in a call"})
    if not python.exists():
        return row(loop, {"not_run": f"{environment(loop)} is missing: make corpus"})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        command = [str(python), "-m", "corpus.present", loop.name, str(out)]
        own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", **_ENVIRONMENT}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | own,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            return row(loop, {"failed": f"longer than {LONGEST} seconds"})
        if not out.exists():
            return row(loop, {"failed": _last_words(done.stderr)})
        return row(loop, json.loads(out.read_text()))


def _last_words(text: str) -> str:
    lines = text.strip().splitlines() or ["ended without a word"]
    return lines[-1][:_LAST_WORDS]


def _parser() -> argparse.ArgumentParser:
    about = "Run loops of the corpus under the audit."
    parser = argparse.ArgumentParser(prog="python -m corpus", description=about)
    of_engine = "only loops of this engine"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names; all by default")
    parser.add_argument("--engine", action="append", choices=ENGINES, help=of_engine)
    for name, told in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=told)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if `--check` finds a loop that is judged worse."""
    given = _parser().parse_args(arguments)
    if given.page:
        PAGE.write_text(page(load().values()))
        return 0
    chosen = loops(tuple(given.patterns or ["*"]), tuple(given.engine or ENGINES))
    if not chosen:
        names = " ".join(given.patterns)
        _parser().error(f"Expected a name of a loop, got {names}; try python -m corpus '*'.")
    before = load()
    rows = []
    for loop in chosen:
        rows.append(run(loop))
        print(rows[-1], flush=True)
        if given.write:
            save(rows[-1:])
    complaints = list(worse(before, rows)) if given.check else []
    for complaint in complaints:
        print(f"worse: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
