"""The state of callbacks in a checkpoint.

Reads attributes of Keras' callbacks, which do not declare their state.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import keras

from wholestep.checkpoints.configuration import Settings, changes, settings_of
from wholestep.checkpoints.snapshot import COLUMNS, LOG
from wholestep.keras_private import set_monitor_op

_SAVER = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_KEPT: dict[type, tuple[str, ...]] = {  # besides their settings
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("best", "wait", "stopped_epoch", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: (*_SAVER, "_current_epoch"),
    keras.callbacks.OrbaxCheckpoint: (*_SAVER, "_total_batches_seen"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
_STATELESS = (
    keras.callbacks.Callback,
    keras.callbacks.CSVLogger,
    keras.callbacks.LambdaCallback,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
)
_WATCHED = ("monitor", "mode")  # for another metric, `best` is meaningless
# change during a run, or may be changed to resume
_MOVED = {name for names in _KEPT.values() for name in names}
_MOVED |= {
    "params",
    "verbose",
    "monitor_op",
    "append",
    "append_header",
    "writer",
    "keys",
    "csv_file",
}
_UNSEEN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)  # added by Keras
_NAMES_UNSEEN = [kind.__name__ for kind in _UNSEEN]
_END = 64  # the number of the last bytes of a CSVLogger's file that must be the same

# the class names of callbacks, and their settings before the run
Known = Sequence[tuple[str, Settings]]


def made(callbacks: list[keras.callbacks.Callback]) -> list[tuple[str, Settings]]:
    """Return the class names of callbacks, and their settings before a run."""
    return [
        (type(c).__name__, {} if isinstance(c, _UNSEEN) else settings_of(c, but=_MOVED))
        for c in callbacks
    ]


def saved_in(state: dict[str, Any], here: Known) -> Known:
    """Return the callbacks of a state with their settings; older releases saved no settings."""
    names = [name for name, _ in state["told"]]
    settings = dict(here)
    return list(
        zip(names, state.get("settings") or [settings.get(n, {}) for n in names], strict=True)
    )


def paired(saved: Known, here: Known) -> list[int | None]:
    """Return for each callback here the index of the saved callback whose state it takes, or None.

    Callbacks of one class are paired by equal settings first, then in order by the metric that they
    watch.

    >>> loss, accuracy = ({"monitor": name, "patience": 1} for name in ("loss", "accuracy"))
    >>> patient = loss | {"patience": 2}
    >>> paired([("Stop", loss), ("Stop", accuracy)], [("Stop", accuracy), ("Stop", patient)])
    [1, 0]
    >>> paired([("Stop", loss)], [("Stop", accuracy)])
    [None]
    """
    indices: list[int | None] = [None] * len(here)
    for names in (None, _WATCHED):
        for at, (kind, settings) in enumerate(here):
            if indices[at] is not None:
                continue
            for i, (saved_kind, saved_settings) in enumerate(saved):
                is_equal = _of(saved_settings, names) == _of(settings, names)
                if saved_kind == kind and is_equal and i not in indices:
                    indices[at] = i
                    break
    return indices


def differing(saved: Known, here: Known) -> list[str]:
    """Describe the callbacks that differ from the saved callbacks, or in their settings.

    >>> differing([("Stop", {"monitor": "val_loss"}), ("Log", {})], [("Stop", {"monitor": "loss"})])
    ["Stop(monitor='loss') starts anew (saved: monitor='val_loss')", 'no Log (saved: Log)']
    """
    words = []
    indices = paired(saved, here)
    left = [i for i in range(len(saved)) if i not in indices]
    for (kind, settings), at in zip(here, indices, strict=True):
        alike = [i for i in left if saved[i][0] == kind]
        if at is not None:
            words += [f"{kind}/{change}" for change in changes(saved[at][1], settings)]
        elif alike:
            left.remove(alike[0])
            before = _watched(saved[alike[0]][1])
            words.append(f"{kind}({_watched(settings)}) starts anew (saved: {before})")
        elif kind not in _NAMES_UNSEEN:
            words.append(f"{kind} (saved: none)")
    lost = [saved[i][0] for i in left if saved[i][0] not in _NAMES_UNSEEN]
    return words + [f"no {kind} (saved: {kind})" for kind in lost]


def _of(settings: Settings, names: tuple[str, ...] | None) -> Settings:
    return settings if names is None else {name: settings.get(name) for name in names}


def _watched(settings: Settings) -> str:
    return ", ".join(
        f"{name}={settings[name]!r}" for name in _WATCHED if settings.get(name, "auto") != "auto"
    )


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the state of a callback: attributes of Keras' classes, and any `get_state()`."""
    state = {name: getattr(callback, name) for name in _known(callback) if hasattr(callback, name)}
    if isinstance(callback, keras.callbacks.CSVLogger):
        with suppress(OSError), open(callback.filename, "rb") as file:
            written = _written(file, file.seek(0, os.SEEK_END))
            state[LOG] = {"file": callback.filename, COLUMNS: callback.keys, **written}
    if hasattr(callback, "get_state"):
        state["own"] = callback.get_state()
    return state


def put_back(callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    """Restore a callback from its `state_of`; other names, as of a changed class, are ignored."""
    if "own" in state and hasattr(callback, "set_state"):
        callback.set_state(state["own"])
    for name in _known(callback):
        if name in state:
            setattr(callback, name, state[name])
    if state.get("best") is not None and getattr(callback, "monitor_op", True) is None:
        # as Keras does at an epoch's end; an earlier batch may be compared with `best`
        set_monitor_op(callback)()
    if isinstance(callback, keras.callbacks.OrbaxCheckpoint):
        vars(callback)["_save_checkpoint"] = partial(_save_once, callback)
    log = state.get(LOG, {})
    if isinstance(callback, keras.callbacks.CSVLogger) and log.get("file") == callback.filename:
        callback.keys = log.get(COLUMNS)  # its columns stay, also where logs have other names now


def go_on_with_file(callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    """Let a CSVLogger append to its file, without the lines after this state, which come again."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return
    callback.append = True
    log = state.get(LOG, {})
    if log.get("file") == callback.filename:
        with suppress(OSError), open(callback.filename, "rb+") as file:
            size = log["size"]
            is_longer = file.seek(0, os.SEEK_END) > size
            if is_longer and {**log, **_written(file, size)} == log:
                file.truncate(size)


def _written(file: BinaryIO, size: int) -> dict[str, Any]:
    """Return the first `size` bytes of a file in short: their number and the last of them."""
    file.seek(max(0, size - _END))
    return {"size": size, "end": file.read(min(size, _END)).decode("latin-1")}


def starts_anew(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has state that cannot be restored."""
    if isinstance(callback, _UNSEEN) or type(callback) in _STATELESS:
        return False
    return not hasattr(callback, "get_state") and not _known(callback)


def _known(callback: keras.callbacks.Callback) -> list[str]:
    return sorted({name for kind in _KEPT if isinstance(callback, kind) for name in _KEPT[kind]})


def _save_once(
    callback: keras.callbacks.OrbaxCheckpoint, step: int, logs: dict[str, Any] | None = None
) -> None:
    """Save a step unless Orbax has it, from the stopped run: Orbax refuses a step twice."""
    if all(each.step != step for each in callback.checkpointer.checkpoints):
        type(callback)._save_checkpoint(callback, step, logs)
