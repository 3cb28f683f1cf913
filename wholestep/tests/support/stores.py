"""Stores in memory and on a local server, and two processes that share one."""

import numpy as np
import pytest

from wholestep.checkpoints.folder import Folder
from wholestep.processes import SingleProcess

fsspec = pytest.importorskip("fsspec")


store = pytest.importorskip("wholestep.checkpoints.store")


Memory = fsspec.get_filesystem_class("memory")


def arrays(step):
    return {"params/0": np.full((3, 4), step, "float32"), "params/1": np.arange(step)}


def filled(path, *steps, rest=lambda step: {}):
    """Return a local folder with checkpoints of these steps."""
    folder = Folder(path)
    folder.lock().release()
    for step in steps:
        folder.write(step, arrays(step), {"step": step}, rest(step))
    return folder


def pushed(url, tmp_path, *steps, **how):
    """Return a store with checkpoints of these steps, and the local folder that they were copied
    from.
    """
    folder = filled(tmp_path / "local", *steps, **how)
    kept = store.Store(url)
    for step in steps:
        store.push(folder, step, kept)
    return folder, kept


class TwoProcesses(SingleProcess):
    count = 2
