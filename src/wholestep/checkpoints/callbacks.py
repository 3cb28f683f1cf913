"""What Keras' callbacks know of a run, and how they go on with it.

It looks inside Keras, whose callbacks keep what they have seen in attributes, and do not say which.
"""

from functools import partial
from typing import Any

import keras

_MONITOR, _SAVER = ("best",), ("_batches_seen_since_last_saving", "_last_batch_seen")
_KEPT: dict[type, tuple[str, ...]] = {  # beside what they were given
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: (*_MONITOR, "wait", "stopped_epoch", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: (*_MONITOR, "wait", "cooldown_counter"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: (*_MONITOR, *_SAVER, "_current_epoch"),
    keras.callbacks.OrbaxCheckpoint: (*_MONITOR, *_SAVER, "_total_batches_seen"),
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


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return what a callback knows: one of Keras' by its attributes, another by its `get_state()`."""
    known = {name: getattr(callback, name) for name in _known(callback) if hasattr(callback, name)}
    return {**known, **({"own": callback.get_state()} if hasattr(callback, "get_state") else {})}


def put_back(callback: keras.callbacks.Callback, state: dict[str, Any]) -> None:
    """Let a callback go on with what `state_of` returned."""
    if "own" in state and hasattr(callback, "set_state"):
        callback.set_state(state["own"])
    for name, value in state.items():
        if name != "own":
            setattr(callback, name, value)
    if state.get("best") is not None and getattr(callback, "monitor_op", True) is None:
        callback._set_monitor_op()  # as Keras does at an epoch's end; a batch before that may be compared with `best`
    if isinstance(callback, keras.callbacks.OrbaxCheckpoint):
        vars(callback)["_save_checkpoint"] = partial(_save_once, callback)


def starts_anew(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback does not go on with what it has seen. A CSVLogger that does not append empties its file."""
    if isinstance(callback, keras.callbacks.CSVLogger) and not callback.append:
        return True
    return type(callback) not in _STATELESS and not hasattr(callback, "get_state") and not _known(callback)


def _known(callback: keras.callbacks.Callback) -> list[str]:
    return sorted({name for kind in _KEPT if isinstance(callback, kind) for name in _KEPT[kind]})


def _save_once(callback: keras.callbacks.OrbaxCheckpoint, step: int, logs: dict | None = None) -> None:
    """Save what Orbax has not. It takes no step twice, and the run may have saved this one before it was stopped."""
    if all(each.step != step for each in callback.checkpointer.checkpoints):
        type(callback)._save_checkpoint(callback, step, logs)
