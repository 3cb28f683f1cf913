"""Keras callbacks, unchanged. Those that need the state run between updates, the others one
dispatch late.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import keras

from wholestep.checkpoints import (
    Snapshot,
    Stateful,
    differing,
    from_json,
    go_on_with_file,
    made,
    paired,
    put_back,
    saved_in,
    starts_anew,
    state_of,
)
from wholestep.checks import nearest
from wholestep.engines import Engine
from wholestep.errors import SpecificationError, invalid, message, warn
from wholestep.keras_private import flush_futures, is_default_hook, should_trace
from wholestep.processes import Processes
from wholestep.reports.compile_notices import ProgbarLogger, can_replace_lines
from wholestep.reports.report import Report
from wholestep.reports.run_report import RunReport
from wholestep.run import Run

Callbacks: TypeAlias = (
    keras.callbacks.Callback | keras.callbacks.CallbackList | list[keras.callbacks.Callback] | None
)

_WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, RunReport)
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
_BARS = (keras.callbacks.ProgbarLogger, ProgbarLogger)
_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT_HOOKS = ("on_predict_batch_begin", "on_predict_batch_end")


class Hooks:
    """The hooks of a batch, called once for `each` batches (`steps_per_execution`), as in Keras.

    Hooks that no callback has are not called: Keras' list would start a thread for them.

    Args:
        hooks: the names of the hooks of a batch's begin and end, and of further hooks that these
            call.
    """

    def __init__(self, known: keras.callbacks.CallbackList, each: int, hooks: tuple[str, ...]):
        # a user-defined list
        own = [known] if type(known) is not keras.callbacks.CallbackList else []
        is_heard = own or any(_overrides(c, hook) for c in known.callbacks for hook in hooks)
        self.each = each
        self._begin, self._end = (
            getattr(known, hook) if is_heard else _tell_nobody for hook in hooks[:2]
        )
        self._open: tuple | None = None

    def begin(self, step: int) -> None:
        """Call the hook of a batch's begin, if it is the first of `each`."""
        if step % self.each == 0:
            self._begin(step)

    def end(self, step: int, logs: dict | None) -> None:
        """Call the hook of a batch's end, if it is the last of `each`."""
        self._open = step - step % self.each + self.each - 1, logs
        if step == self._open[0]:
            self.close()

    def close(self) -> None:
        """Call the hook of the end of the last, incomplete group of batches."""
        if self._open is not None:
            last = self._open
            self._open = None
            self._end(*last)


class CallbackRunner:
    """Calls a list of Keras callbacks during a run.

    With several processes, Keras' callbacks print and write files only in process 0; all others run
    in each.

    Args:
        callbacks: as passed to `fit`: one, several, or a `keras.callbacks.CallbackList`.
        engine: the engine, which has the processes.

    Raises:
        SpecificationError: a callback saves weights that are sharded over devices of several
            processes.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Callbacks,
        *,
        verbose: int | str,
        epochs: int,
        steps: int | None,
        history: bool,
        engine: Engine,
    ):
        processes = engine.processes
        if processes.count > 1:
            callbacks = _of_several(callbacks, processes)
            if processes.index:
                verbose = 0
        known = callbacks
        if not isinstance(known, keras.callbacks.CallbackList):
            known = _list_of(callbacks, model, history, verbose=verbose, epochs=epochs, steps=steps)
        self.model = model
        self.callbacks = known
        self._steps = steps
        listed = known.callbacks
        bars = [c for c in listed if isinstance(c, keras.callbacks.ProgbarLogger)]
        self.shown = bars[0] if bars else None
        self.bar = self.shown if isinstance(self.shown, ProgbarLogger) else None
        self._readers = [c for c in listed if isinstance(c, ProgbarLogger | RunReport)]
        self.made = made(listed)
        self._is_new = True  # no update has been reported
        # The callbacks that have received the end of the current epoch, in this order.
        self._received: list[keras.callbacks.Callback] = []
        self.each = getattr(model, "steps_per_execution", 1) or 1
        self._train, self.test, self.predict = (
            Hooks(known, self.each, hooks) for hooks in (_TRAIN_HOOKS, _TEST_HOOKS, _PREDICT_HOOKS)
        )
        if processes.count > 1 and history:
            _check_savers(known, engine.variables.sharded(model.variables))
        self._compare_hooks(processes)

    def _compare_hooks(self, processes: Processes) -> None:
        """Record which hooks read the state; true in all processes if in one.

        They send the same updates together.
        """
        callbacks = self.callbacks.callbacks
        hooked = [c for c in callbacks if any(_overrides(c, hook) for hook in _TRAIN_HOOKS)]
        self.has_hooks = any(callback is not self.bar for callback in hooked)
        flags = (
            not all(_needs_numbers_only(c) for c in hooked),
            self._looks_at(*_TEST_HOOKS),
            self._looks_at(*_PREDICT_HOOKS),
        )
        self.needs_state, self.has_test_hooks, self.has_predict_hooks = map(
            any, zip(*processes.all_gather(flags, "comparing callbacks"), strict=True)
        )

    def note(self, report: Report, num: int, step: int, logs: Callable[[], dict]) -> None:
        """Pass the report of `num` updates to the callbacks that need more than logs, before their
        hooks.

        The progress bar shows the logs of the last one, update `step` of the epoch, unless others
        have such hooks.
        """
        if self._is_new:
            self._is_new = False
            warn_of_misspelt(self.callbacks.callbacks, list(logs()))
        for reader in self._readers:
            reader.note(report, num)
        if self.bar is not None and not self.has_hooks:
            self.bar.on_train_batch_end(step, dict(sorted(logs().items())))  # as Keras sorts them

    def tell(self, step: int, logs: dict) -> None:
        """Call the hooks of one update of the epoch, after it."""
        if not self.needs_state:
            self.begin(step)
        self._train.end(step, logs)

    def begin(self, step: int) -> None:
        """Call the hook of an update's begin."""
        self._train.begin(step)

    def end(self) -> None:
        """Call the hook of the last, incomplete group of updates."""
        self._train.close()

    def note_length(self, num: int | None) -> None:
        """Tell the callbacks the number of updates of the next epoch, if it is another one."""
        if num not in (None, self._steps):
            self._steps = num
            self.callbacks.set_params({**(self.callbacks.params or {}), "steps": num})

    def begin_epoch(self, run: Run) -> None:
        """Call the epoch-begin hook, unless the run resumes after an epoch-end hook of each
        callback.
        """
        if run.place.told == 0:
            self._received = []
        if run.place.logs is None or self._waiting:
            self.callbacks.on_epoch_begin(run.place.epoch)

    def end_epoch(self, run: Run) -> None:
        """Call the epoch-end hook of each callback that has not had it; each sees the logs that
        those before it set.
        """
        known = self.callbacks
        place = run.place
        waiting = self._waiting
        is_custom = type(known).on_epoch_end is not keras.callbacks.CallbackList.on_epoch_end
        if is_custom and not self._received:
            known.on_epoch_end(place.epoch, place.logs)
            self._note_received(run, waiting)
            return
        flush_futures(known)()
        if place.told == 0:
            logs = dict(sorted((place.logs or {}).items()))  # Keras passes a copy, in this order
            run.end_epoch(logs)
        for callback in waiting:
            self._note_received(run, [callback])
            callback.on_epoch_end(place.epoch, place.logs)

    @property
    def _waiting(self) -> list[keras.callbacks.Callback]:
        """The callbacks that have not received the end of the current epoch."""
        received = {id(callback) for callback in self._received}
        return [callback for callback in self.callbacks.callbacks if id(callback) not in received]

    def _note_received(self, run: Run, callbacks: list[keras.callbacks.Callback]) -> None:
        self._received = [*self._received, *callbacks]
        run.note_received(len(self._received))

    def get_state(self) -> dict[str, Any]:
        """Return the state of Keras' callbacks by attributes, of others by their `get_state()`.

        Callbacks that have received the end of the current epoch come first: `CallPosition.told` of
        them.
        """
        settings_of_all = [settings for _, settings in self.made]
        by_id = dict(zip(map(id, self.callbacks.callbacks), settings_of_all, strict=True))
        ordered = [*self._received, *self._waiting]
        told = [(type(callback).__name__, state_of(callback)) for callback in ordered]
        settings = [by_id[id(callback)] for callback in ordered]
        return {"stops": self.stops, "told": told, "settings": settings}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of each callback; see `paired`."""
        self.model.stop_training = state["stops"]
        places = self._places(state)
        for callback in self.callbacks.callbacks:
            if id(callback) in places:
                put_back(callback, state["told"][places[id(callback)]][1])

    def go_on_from(self, run: Run, snapshot: Snapshot) -> None:
        """Resume files and the delivery of an epoch's end, before `on_train_begin`.

        An epoch is over when all callbacks of the saved run have received its end; new callbacks
        then begin with the next epoch.
        """
        state = from_json(snapshot.facts["also"].get("callbacks"), snapshot.arrays)
        places = {} if state is None else self._places(state)
        for callback in self.callbacks.callbacks:
            saved = state["told"][places[id(callback)]][1] if id(callback) in places else {}
            go_on_with_file(callback, saved)
        if state is None or not run.place.told:
            return
        num = run.place.told
        known = self.callbacks.callbacks
        is_over = num >= len(state["told"])
        self._note_received(run, [c for c in known if is_over or places.get(id(c), num) < num])

    def _places(self, state: dict[str, Any]) -> dict[int, int]:
        """Return the index of each callback's saved state, by the id of the callback."""
        indexes = paired(saved_in(state, self.made), self.made)
        pairs = zip(self.callbacks.callbacks, indexes, strict=True)
        return {id(callback): i for callback, i in pairs if i is not None}

    def changes(self, state: dict[str, Any] | None) -> list[str]:
        """Return the differences between the callbacks and a saved state, as text."""
        return [] if state is None else differing(saved_in(state, self.made), self.made)

    @property
    def keeping(self) -> list[tuple[str, Stateful]]:
        """The callbacks that have a `get_state`, each with its name."""
        return [(type(c).__name__, c) for c in self.callbacks.callbacks if hasattr(c, "get_state")]

    def left(self, step: int) -> int:
        """Return the number of updates, from this one on, before the callbacks are called."""
        return self.each - step % self.each

    @property
    def unknown(self) -> list[str]:
        """The callbacks without a known state, which start anew when a run is resumed."""
        return [type(c).__name__ for c in self.callbacks.callbacks if starts_anew(c)]

    def _looks_at(self, *hooks: str) -> bool:
        """Whether a callback has one of these hooks, except the progress bar, which may be called
        late.
        """
        others = [c for c in self.callbacks.callbacks if type(c) not in _BARS]
        return any(_overrides(c, hook) for c in others for hook in hooks)

    @property
    def stops(self) -> bool:
        """Whether a callback asked to stop."""
        return bool(self.model.stop_training)


def refuse_backup(callbacks: Callbacks) -> None:
    """Refuse a callback that resumes a run as well.

    Raises:
        SpecificationError: there is a BackupAndRestore.
    """
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in _each(callbacks)):
        must = "Either checkpoints or BackupAndRestore must resume a run."
        raise SpecificationError(
            message(must, "both", "leave BackupAndRestore out: a checkpoint holds more.")
        )


def warn_of_misspelt(callbacks: list[keras.callbacks.Callback], names: list[str]) -> None:
    """Warn of callbacks that monitor a name which is not in the logs, but spelt like one that is.

    Others are left alone: another callback may add them to the logs.
    """
    known = [*names, *(f"val_{name}" for name in names)]
    for callback in callbacks:
        monitored = getattr(callback, "monitor", None)
        if isinstance(monitored, str) and monitored not in known:
            meant = nearest(monitored, known)
            if meant is not None:
                must = f"{type(callback).__name__} must monitor a name in the logs."
                warn(message(must, f"{monitored!r}, among {', '.join(names)}", f"{meant!r}."))


def _each(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a call, in their order."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    each = keras.tree.flatten(callbacks or [])
    for callback in each:
        if isinstance(callback, type):
            attempt = f"an object of it, {callback.__name__}(...)."
            raise invalid(
                "A callback must be an object.", f"the class {callback.__name__}", attempt
            )
    return each


def _list_of(
    callbacks: Callbacks, model: keras.Model, history: bool, *, verbose: int | str, **params: Any
) -> keras.callbacks.CallbackList:
    """Return the callbacks of a call as Keras' list, with a progress bar if `verbose`."""
    # of one alone, or nested, Keras would look at no hook, and call it in a thread
    each = _each(callbacks)
    known = keras.callbacks.CallbackList(
        each,
        add_history=history,
        add_progbar=verbose != 0,
        verbose=verbose,
        model=model,
        **params,
    )
    if history and verbose in (1, "auto") and can_replace_lines():
        _replace_bar(known, each)
    return known


def _of_several(callbacks: Callbacks, processes: Processes) -> Callbacks:
    """Return this process's callbacks. They are changed permanently, as the process belongs to one
    run.
    """
    kept = [c for c in _each(callbacks) if processes.index == 0 or type(c) not in _WRITERS]
    for callback in kept:
        own = vars(callback)
        if isinstance(callback, _SAVERS):
            own["_save_model"] = partial(_save, callback, processes)
        if processes.index > 0 and isinstance(callback, keras.callbacks.BackupAndRestore):
            own["on_train_end"] = lambda logs=None: None  # the first process deletes the backup
        if processes.index > 0 and type(callback).__module__.startswith("keras."):
            own["verbose"] = 0
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return kept
    callbacks.callbacks = kept
    return callbacks


def _replace_bar(
    known: keras.callbacks.CallbackList, given: list[keras.callbacks.Callback]
) -> None:
    """Replace Keras' progress bar, which comes last, by the bar with rows per second, unless the
    user has a bar.
    """
    if (
        type(known.callbacks[-1]) is keras.callbacks.ProgbarLogger
        and known.callbacks[-1] not in given
    ):
        known.callbacks[-1] = ProgbarLogger()
        known.callbacks[-1].set_params(known.params)


def _check_savers(callbacks: keras.callbacks.CallbackList, sharded: list[str]) -> None:
    if any(isinstance(c, keras.callbacks.OrbaxCheckpoint) for c in callbacks.callbacks):
        must = (
            "OrbaxCheckpoint works only in a run of one process: it synchronises processes itself."
        )
        raise SpecificationError(message(must, "several processes", "checkpoints= in its place."))
    savers = [
        type(c).__name__ for c in callbacks.callbacks if isinstance(c, _SAVERS) or _keeps_weights(c)
    ]
    if savers and sharded:
        must = (
            "Keras cannot save weights that are sharded over devices in a run of several processes."
        )
        attempt = (
            f"checkpoints= in place of {' and '.join(savers)}, or keras.distribution.DataParallel."
        )
        raise SpecificationError(message(must, ", ".join(sharded[:3]), attempt))


def _keeps_weights(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights


def _save(
    callback: keras.callbacks.Callback, processes: Processes, *arguments: object, **options: object
) -> None:
    """Save, in process 0 alone. The others wait meanwhile."""
    if processes.index > 0:
        return
    processes.set_status("saving")
    distribution = keras.distribution.distribution()
    # under which Keras creates variables in all processes together
    keras.distribution.set_distribution(None)
    try:
        type(callback)._save_model(callback, *arguments, **options)
    finally:
        keras.distribution.set_distribution(distribution)
    processes.set_status("in a callback, after saving")


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    return not is_default_hook(getattr(callback, hook))


def _tell_nobody(batch: int, logs: dict | None = None) -> None:
    """Do nothing: no callback has this hook."""


def _needs_numbers_only(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback's hooks of a batch never read the model: it says so by `reads_model`, or
    they are those of such a class of Keras.
    """
    if getattr(callback, "reads_model", True) is False:
        return True
    own = keras.callbacks
    known = (*_SAVERS, *_BARS, own.TensorBoard, own.History, own.TerminateOnNaN)
    kind = next((each for each in type(callback).__mro__ if each in known), None)
    hooks = [(getattr(callback, hook), getattr(kind, hook, None)) for hook in _TRAIN_HOOKS]
    if kind is None or any(getattr(hook, "__func__", None) is not theirs for hook, theirs in hooks):
        return False
    if isinstance(callback, _SAVERS):
        return callback.save_freq == "epoch"
    return kind is not own.TensorBoard or (
        callback.update_freq == "epoch" and not should_trace(callback)
    )
