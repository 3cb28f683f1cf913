"""The Keras backend, found before Keras is imported, so that the error of a missing backend is ours."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from wholestep.errors import SpecificationError, message


def check() -> None:
    """Raise if the Keras backend has no engine here, before Keras fails with a longer traceback.

    Raises:
        SpecificationError: the Keras backend is neither jax nor tensorflow, or is not installed.
    """
    name = sys.modules["keras"].config.backend() if "keras" in sys.modules else configured()
    if name not in ("jax", "tensorflow"):
        raise unknown(name)
    if name not in sys.modules and find_spec(name) is None:
        must = f"The Keras backend is {name}, so {name} must be installed."
        other = "tensorflow" if name == "jax" else "jax"
        attempt = f"pip install 'wholestep[{name}]', or set the environment variable KERAS_BACKEND={other}."
        raise SpecificationError(message(must, "no such package", attempt))


def unknown(name: str) -> SpecificationError:
    """Return the error of a backend without an engine."""
    must = "The Keras backend must be jax or tensorflow."
    attempt = "set the environment variable KERAS_BACKEND before importing keras."
    return SpecificationError(message(must, name, attempt))


def configured() -> str:
    """Return the backend that Keras will use: from the environment, else from `keras.json`, else TensorFlow."""
    folder = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras").expanduser()
    try:
        said = json.loads((folder / "keras.json").read_text()).get("backend", "")
    except (OSError, ValueError):
        said = ""
    return os.environ.get("KERAS_BACKEND") or said or "tensorflow"
