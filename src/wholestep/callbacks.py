"""Keras callbacks, unchanged. Who needs the state gets it between updates; who needs numbers, one dispatch late."""

from typing import Any

import keras

_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Watch:
    """What watches a run: a list of Keras callbacks, and what they need.

    With several processes, Keras' own callbacks print and write files in the first alone; all others run in each.

    Args:
        callbacks: as given to `fit`: one, several, or a ready `keras.callbacks.CallbackList`.
        peers: the other processes.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Any,
        *,
        verbose: Any,
        epochs: int,
        steps: int | None,
        history: bool,
        peers: Any,
    ):
        if peers.index > 0:
            verbose, callbacks = 0, _silenced(callbacks)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_history=history,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=steps,
                model=model,
            )
        self.model = model
        self.callbacks = callbacks
        hooked = [c for c in callbacks.callbacks if any(_overrides(c, hook) for hook in _TRAIN_HOOKS)]
        self.has_hooks = bool(hooked)
        # In all processes if in one: they send the same updates together.
        self.needs_state = any(peers.gather(not all(_needs_numbers_only(c) for c in hooked)))

    def tell(self, step: int, logs: dict) -> None:
        """Tell the callbacks of one update of the epoch."""
        if not self.needs_state:
            self.begin(step)
        self.callbacks.on_train_batch_end(step, logs)

    def begin(self, step: int) -> None:
        """Tell the callbacks that an update begins; who needs the state is told before it does."""
        self.callbacks.on_train_batch_begin(step)

    @property
    def has_test_hooks(self) -> bool:
        """Whether anybody looks at the numbers of every batch of an evaluation."""
        hooks = ("on_test_batch_begin", "on_test_batch_end")
        return any(_overrides(c, hook) for c in self.callbacks.callbacks for hook in hooks)

    @property
    def stops(self) -> bool:
        """Whether a callback asked to stop."""
        return bool(self.model.stop_training)


def _silenced(callbacks: Any) -> Any:
    """Return the callbacks without those that only write files; the others of Keras' write none."""
    ready = isinstance(callbacks, keras.callbacks.CallbackList)
    known = list(callbacks.callbacks if ready else keras.tree.flatten(callbacks or []))
    kept = [c for c in known if type(c) not in (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)]
    for callback in kept:
        if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
            vars(callback)["_save_model"] = lambda *arguments, **options: None
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            vars(callback)["on_train_end"] = lambda logs=None: None  # the first process deletes the backup
    if ready:
        callbacks.callbacks = kept
        return callbacks
    return kept


def _overrides(callback: Any, hook: str) -> bool:
    return not getattr(getattr(callback, hook), "_is_default", False)


def _needs_numbers_only(callback: Any) -> bool:
    """Keras' own callbacks whose hooks of a batch never look at the model. Any other may."""
    known = keras.callbacks
    if isinstance(callback, known.ModelCheckpoint | known.BackupAndRestore):
        return callback.save_freq == "epoch"
    if isinstance(callback, known.TensorBoard):
        return callback.update_freq == "epoch" and not callback._should_trace
    return type(callback) in (known.ProgbarLogger, known.History, known.TerminateOnNaN)
