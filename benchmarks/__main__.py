"""`python -m benchmarks`: one table, printed and written to out/benchmarks.md."""

import argparse
from pathlib import Path

from benchmarks import suite, table
from benchmarks.children import use_cores

_OUT = Path(__file__).parent.parent / "out" / "benchmarks.md"
_NUM_CORES = 2


def main() -> None:
    """Measure what was asked for, print the table and write it."""
    arguments = _arguments()
    cores = use_cores(_NUM_CORES)
    rows = [row for work in arguments.work for row in suite.measure(work, arguments.engines, quick=arguments.quick)]
    text = table.markdown(rows, table.circumstances(cores, quick=arguments.quick))
    print(text)
    _OUT.parent.mkdir(exist_ok=True)
    _OUT.write_text(text + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    every = ",".join(suite.WORKS)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: few rows, one pair; its figures mean nothing"
    )
    parser.add_argument("--work", type=_among(suite.WORKS), default=list(suite.WORKS), help=f"of {every}")
    parser.add_argument("--engines", type=_among(suite.ENGINES), default=list(suite.ENGINES), help="of jax,tensorflow")
    return parser.parse_args()


def _among(known: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}. Received: {', '.join(unknown)}.")
        return names

    return parse


if __name__ == "__main__":
    main()
