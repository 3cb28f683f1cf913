"""The time that imports take in this fresh process."""

import importlib
import time


def measure(modules: list[str]) -> float:
    """Return the seconds that importing these modules takes, one after the other."""
    begin = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    return time.perf_counter() - begin
