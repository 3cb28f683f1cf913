"""The Keras backend, found before Keras is imported, so that the error of a missing backend is
ours.

`wholestep doctor` shows versions, engine, devices and memory.
"""

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from wholestep.errors import SpecificationError, message, pip_install

_PACKAGES = ("keras", "jax", "tensorflow", "tensorflow-cpu", "numpy", "torch")
_ENGINES = ("jax", "tensorflow")


def check() -> None:
    """Raise if the Keras backend has no engine here, before Keras fails with a longer traceback.

    Raises:
        SpecificationError: the Keras backend is neither jax nor tensorflow, or not installed.
    """
    name = sys.modules["keras"].config.backend() if "keras" in sys.modules else configured()
    here = [engine for engine in _ENGINES if sys.modules.get(engine) or find_spec(engine)]
    if not here:
        must = "JAX or TensorFlow must be installed: wholestep trains Keras models on them."
        is_chosen = name in _ENGINES and _said()  # Keras' default is no choice of the user
        attempt = installing(name if is_chosen else "jax")
        raise SpecificationError(message(must, installed(), attempt))
    if name not in _ENGINES:
        raise unknown(name)
    if name not in here:
        must = f"The Keras backend is {name}, so {name} must be installed."
        install = pip_install(f"wholestep[{name}]")
        attempt = f"set the environment variable KERAS_BACKEND={here[0]}, or {install}."
        raise SpecificationError(message(must, f"only {here[0]}", attempt))


def installing(engine: str) -> str:
    """Return the advice to install an engine, and to choose it."""
    install = pip_install(f"wholestep[{engine}]")
    return f"{install}, and set the environment variable KERAS_BACKEND={engine}."


def installed() -> str:
    """Return the packages with their versions, as far as they are installed."""
    names = ("wholestep", *_PACKAGES)
    return ", ".join(f"{name} {found}" for name in names if (found := _version(name)))


def unknown(name: str) -> SpecificationError:
    """Return the error of a backend without an engine."""
    must = "The Keras backend must be jax or tensorflow."
    attempt = "set the environment variable KERAS_BACKEND before importing keras."
    return SpecificationError(message(must, name, attempt))


def configured() -> str:
    """Return the backend that Keras will use: from the environment, else from `keras.json`, else
    TensorFlow.
    """
    return _said() or "tensorflow"


def _said() -> str:
    """Return the backend that the user has chosen; empty if none was."""
    folder = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras").expanduser()
    try:
        said = json.loads((folder / "keras.json").read_text()).get("backend", "")
    except (OSError, ValueError):
        said = ""
    return os.environ.get("KERAS_BACKEND") or said


def machine() -> list[str]:
    """Return the facts that hold without an engine, a line for each."""
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        f"packages: {installed()}",
        f"system: Python {platform.python_version()}, {platform.platform()}",
        f"machine: {cores} cores, {memory:.1f} GiB of memory",
    ]


def circumstances() -> tuple[list[str], list[str]]:
    """Return the facts on which results and speed depend, a line for each, and reasons why training
    would be slow.

    Raises:
        SpecificationError: see `check`.
    """
    check()
    import keras

    name = configured()
    devices = keras.distribution.list_devices()
    given = "KERAS_BACKEND" if "KERAS_BACKEND" in os.environ else "keras.json, or Keras' default"
    cores = os.cpu_count() or 1
    flags = os.environ.get("XLA_FLAGS", "none")
    facts = {
        "engine": f"{name} (from {given})",
        "devices": f"{len(devices)}: {', '.join(devices[:8])}",
        "numbers": f"{keras.config.floatx()}, policy {keras.config.dtype_policy().name}",
        "XLA_FLAGS": flags,
    }
    slow = []
    if name == "jax":
        folder = sys.modules["jax"].config.jax_compilation_cache_dir
        facts["compiled programs"] = (
            "kept for one process" if folder is None else f"kept in {folder}"
        )
        if folder is None:
            short = (
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 for programs that compile within "
                "a second"
            )
            slow.append(
                f"Every run compiles anew. Set JAX_COMPILATION_CACHE_DIR to a folder, and {short}."
            )
    if Path("/proc/driver/nvidia").exists() and not any(
        "cpu" not in device.lower() for device in devices
    ):
        slow.append(
            f"The GPU is not used: {name} sees only {devices[0]}. Install its build for CUDA."
        )
    if keras.config.floatx() == "float64":
        slow.append("float64 is several times as slow as float32.")
    if (
        name == "jax"
        and any("gpu" in device for device in devices)
        and "gpu_deterministic_ops=true" not in flags
    ):
        facts["repeatable"] = "not to the bit: on a GPU, call wholestep.deterministic() first"
    if "device_count" in flags and len(devices) > cores:
        slow.append(f"{len(devices)} virtual devices share {cores} cores.")
    return [*machine(), *(f"{fact}: {value}" for fact, value in facts.items())], slow


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
