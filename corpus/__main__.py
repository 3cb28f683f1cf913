"""The command: run loops of the corpus under stepcheck, and write a line for each.

python -m corpus [PATTERN ...] [--engine jax] [--jobs 2] [--alone] [--check] [--write] [--page]
"""

import argparse
import sys
from collections.abc import Sequence

from corpus.loops import ENGINES, loops
from corpus.table import TABLE, load, page, save, worse
from corpus.workers import ROOT, rows

PAGE = ROOT / "stepcheck" / "docs" / "corpus.md"
_FLAGS = {
    "alone": "run each loop in a process of its own",
    "check": f"compare with {TABLE.name}; fail if it is worse",
    "write": f"write the rows into {TABLE.name}",
    "page": "write stepcheck/docs/corpus.md from the table, and run nothing",
}


def _parser() -> argparse.ArgumentParser:
    about = "Run loops of the corpus under stepcheck."
    parser = argparse.ArgumentParser(prog="python -m corpus", description=about)
    of_engine = "only loops of this engine"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names; all by default")
    parser.add_argument("--engine", action="append", choices=ENGINES, help=of_engine)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; 1 by default")
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
    done = []
    for row in rows(chosen, jobs=given.jobs, is_alone=given.alone):
        done.append(row)
        print(row, flush=True)
        if given.write:
            save([row])
    complaints = list(worse(before, done)) if given.check else []
    if given.check and all(row.not_run for row in done):
        complaints.append(f"no loop was run: {done[0].not_run}")
    for complaint in complaints:
        print(f"worse: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
