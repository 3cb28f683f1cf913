"""`python -m benchmarks`: one table, printed and written to out/benchmarks.md, and as JSON to
out/benchmarks.jsonl.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import suite, table
from benchmarks.children import use_cores

_OUT = Path(__file__).parent.parent / "out"
_NUM_CORES = 2


def main() -> None:
    """Measure what was asked for, print the table and write it."""
    arguments = _arguments()
    # which may be the file written below
    earlier = None if arguments.check is None else arguments.check.read_text()
    cores = use_cores(_NUM_CORES)
    rows = [
        row
        for work in arguments.work
        for row in suite.measure(work, arguments.engines, quick=arguments.quick)
    ]
    circumstances = table.circumstances(cores, quick=arguments.quick)
    text = table.markdown(rows, circumstances)
    print(text)
    _OUT.mkdir(exist_ok=True)
    (_OUT / "benchmarks.md").write_text(text + "\n")
    (_OUT / "benchmarks.jsonl").write_text(table.lines(rows, circumstances))
    if earlier is not None and (found := table.worse(rows, earlier)):
        sys.exit("\n".join(["Worse than before, beyond the noise of both runs:", *found]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    every = ",".join(suite.WORKS)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke run: few rows, one pair; its figures mean nothing",
    )
    parser.add_argument(
        "--work", type=_among(suite.WORKS), default=list(suite.WORKS), help=f"of {every}"
    )
    parser.add_argument(
        "--engines",
        type=_among(suite.ENGINES),
        default=list(suite.ENGINES),
        help="of jax,tensorflow",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="fail if a comparison is worse than in this benchmarks.jsonl",
    )
    arguments = parser.parse_args()
    if arguments.check and arguments.quick:
        parser.error("--check needs a whole run: the figures of --quick mean nothing.")
    return arguments


def _among(known: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"must be among {', '.join(known)}. Received: {', '.join(unknown)}."
            )
        return names

    return parse


if __name__ == "__main__":
    main()
