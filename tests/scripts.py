"""Scripts that tests start in processes of their own."""

import os
from pathlib import Path

HERE = Path(__file__).parent


def lean(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this process's environment, in which Keras starts in half the time (tests/lean), with these beside.

    Args:
        folders: from which a script may import, too.
    """
    known = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(HERE / "lean"), *map(str, folders), *known]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
