"""Run: the state and position of a training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import keras

from wholestep.checkpoints import (
    FACTS,
    GROUPS,
    CallPosition,
    DataPosition,
    Numbers,
    RunFacts,
    Snapshot,
    Stateful,
    advance_to,
    check_goes_on,
    from_json,
    note,
    own_copy,
    to_json,
)
from wholestep.data import Batches, layout_of
from wholestep.errors import SpecificationError, message
from wholestep.model import Findings
from wholestep.program import ALONE, EPOCH, GOES_ON
from wholestep.reports.report import ReportLayout
from wholestep.state import State, Variables
from wholestep.tree import Tensor

Copied = Callable[[str, Tensor], Numbers]


@dataclass
class Run:
    """The state and position of a training. It can be saved between any two blocks of updates, and
    restored elsewhere.

    Args:
        state: the values that the next update spends; None before the first, and until a restored
            snapshot is assigned.
        number: the number of the last update: the optimizer's `iterations` plus the number of
            skipped updates.
        num_skipped: the number of updates that were skipped because they were not finite.
        begins: how the next update begins, see `wholestep.program.span`.
        variables: the variables whose values the state holds; another executor does not use this
            state.
        epochs: the number of epochs of the data that have begun; the next call uses the order of
            the next epoch.
        place: the position of the current call.
        data: the position in the data, recorded at each snapshot and at the end of a call.
        layout: the layout of the epoch's reports; None until an update has been sent.
        findings: the measurements by which updates are planned.
        also: other state that is saved with the run, by name.
        settle: a weak reference to the function that returns the number of skipped updates, or
            raises a NonFiniteError.
        arrive: a weak reference to the function that assigns a restored snapshot, as far as the
            model is built.
        own: a weak reference to the function that returns the engine's own variables of the model,
            by path.
        restored: the snapshot from which the next call resumes.
        assigned: by id, the variables that have received their values from it, and may have been
            changed since.

    >>> import keras, numpy as np, wholestep as ws
    >>> x, y = np.arange(24, dtype="float32").reshape(8, 3), np.ones((8, 1), "float32")
    >>> def fresh():
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    ...     return ws.Trainer(model)
    >>> first, second, whole = fresh(), fresh(), fresh()
    >>> for step in first.steps((x, y), epochs=2):
    ...     if step.number == 1:
    ...         break
    >>> second.run.restore(first.run.snapshot())
    >>> [step.number for step in second.steps((x, y), epochs=2)]
    [2]
    >>> [step.number for step in whole.steps((x, y), epochs=2)]
    [1, 2]
    >>> np.array_equal(second.model.get_weights()[0], whole.model.get_weights()[0])
    True
    """

    state: State | None = None
    number: int = 0
    num_skipped: int = 0
    begins: int = EPOCH
    variables: Variables | None = None
    epochs: int = 0
    place: CallPosition = field(default_factory=CallPosition)
    data: DataPosition = field(default_factory=DataPosition)
    layout: ReportLayout | None = None
    findings: Findings = field(default_factory=Findings)
    also: dict[str, Stateful] = field(default_factory=dict)
    settle: Callable[[], Callable[[], int] | None] = lambda: None
    arrive: Callable[[], Callable[[], None] | None] = lambda: None
    own: Callable[[], Callable[[], dict[str, Any]] | None] = lambda: None
    restored: Snapshot | None = None
    assigned: WeakValueDictionary[int, keras.Variable] = field(default_factory=WeakValueDictionary)
    _batches: Batches | None = None

    @contextmanager
    def under_way(
        self,
        call: str,
        batches: Batches,
        *,
        are_given: bool,
        also: dict[str, Stateful] | None = None,
    ) -> Iterator[Snapshot | None]:
        """Record the position of a call, and yield the result of `resume`; then restore the
        position of an outer call.

        Args:
            also: other state that is saved with the run during the call and, if the call fails,
                until the next one.
        """
        outer = (self._batches, self.place, self.data, self.also)
        before = self._as_it_is()
        try:
            resumed = self.resume(call, batches, are_given=are_given)
            self.data.layout = layout_of(batches)
            batches.note_move()  # a loop over the same batches that has not ended must not go on
        except BaseException:
            vars(self).update(before)
            raise
        self._batches = batches
        self.also = also or {}
        try:
            yield resumed
            self.also = {}
        finally:
            try:
                self._note_data()
            finally:
                self._batches = None
                if outer[0] is not None:
                    self._batches, self.place, self.data, self.also = outer

    def _as_it_is(self) -> dict[str, Any]:
        """Return all attributes, with copies of `place` and `data`, which a call changes in
        place.
        """
        return vars(self) | {"place": replace(self.place), "data": replace(self.data)}

    @property
    def is_under_way(self) -> bool:
        """Whether a call of `fit` or `steps` is in progress."""
        return self._batches is not None

    def _note_data(self) -> None:
        if self._batches is not None:
            note(self.data, self._batches)
            epoch, step = self.data.position
            self.epochs = max(self.epochs, epoch + (step > 0))

    def put_back_also(self, snapshot: Snapshot) -> None:
        """Restore the other state that was saved with the run."""
        for name, state in from_json(snapshot.facts["also"], snapshot.arrays).items():
            if name in self.also:
                self.also[name].set_state(state)

    # ---- further changes of a run: no other module assigns to its attributes ----

    def connect(
        self, settle: Callable[[], Any], arrive: Callable[[], Any], own: Callable[[], Any]
    ) -> None:
        """Set the weak references `settle`, `arrive` and `own`."""
        self.settle = settle
        self.arrive = arrive
        self.own = own

    def own_variables(self) -> dict[str, Any]:
        """Return the engine's own variables of the model, by path: no part of the state, but of a
        snapshot.
        """
        own = self.own()
        return {} if own is None else own()

    def set_state(
        self, state: State, variables: Variables | None = None, *, begins: int | None = None
    ) -> None:
        """Set the values that the next update spends and, if given, their variables and how that
        update begins.
        """
        self.state = state
        self.variables = self.variables if variables is None else variables
        self.begins = self.begins if begins is None else begins

    def sent(self, num: int, layout: ReportLayout, *, in_call: bool) -> None:
        """Count updates that were sent; single updates (`in_call=False`) belong to no epoch of a
        call.
        """
        self.number = self.number + num
        self.begins = GOES_ON
        self.layout = layout
        self.place.done += num if in_call else 0

    def failed(self, number: int, *, in_call: bool) -> None:
        """Move back to before update `number`, which was not applied; nor was any after it."""
        self.place.done -= self.number + 1 - number if in_call else 0
        self.number = number - 1

    def counted(self, number: int, num_skipped: int) -> None:
        """Set the number of the last update, and the number of skipped updates."""
        self.number = number
        self.num_skipped = num_skipped

    def noted(self, last: str, state: Any, latest: dict[str, Any] | None = None) -> None:
        """Record the digest of the last batch, the stream's state after it and, if given, the last
        update's logs.
        """
        self.data.last, self.data.state = last, state
        self.place.latest = self.place.latest if latest is None else latest

    def begin_update(self) -> None:
        """Begin an epoch of a single update, with empty sums and metrics."""
        self.begins = ALONE

    def begin_epoch(self, epoch: int, position: tuple[int, int]) -> None:
        """Set the position of the call to the start of an epoch."""
        self.place = CallPosition(self.place.call, epoch, began=position[0])

    def open_epoch(self) -> None:
        """Record that the callbacks have received the start of the epoch."""
        self.place.is_open = True

    def end_updates(self, latest: dict[str, Any]) -> None:
        """Record the logs of the last update of an epoch, before its validation."""
        self.place.latest = latest

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Record the logs of an epoch, after its updates and its validation."""
        self.place.logs = logs

    def note_received(self, num: int) -> None:
        """Record the number of callbacks that have received the epoch's end, or are about to."""
        self.place.told = num

    def end_call(self) -> None:
        """Set the position to between calls, with nothing to resume."""
        self.restored, self.place = None, CallPosition()

    def has_resumed(self) -> None:
        """Drop the snapshot from which the run has resumed."""
        self.restored = None

    def adopt(self, findings: Findings) -> None:
        """Replace the findings by which updates are planned."""
        self.findings = findings

    def drop(self) -> None:
        """Drop the state: the next call assigns the remaining values of the restored snapshot."""
        self.state = self.variables = None

    def snapshot(self, copied: Copied = own_copy) -> Snapshot:
        """Return a snapshot of the training. Waits for the device.

        Arrays are the parameters ("params/0", ...), the optimizer's variables ("slots/..."), moving
        statistics, seeds and other variables of the model ("buffers/..."), the metrics, the sums of
        the epoch, and the `tf.Variable`s in attributes of the model and its objective. The rest is
        JSON. A snapshot may be taken between calls, between two steps, after a failure, and in any
        hook of a callback. In the hooks of a batch, later callbacks of the list have not received
        the batch yet: a callback that takes snapshots there must be the last.

        Args:
            copied: a function (name, value) that returns the copy to keep.

        Raises:
            SpecificationError: nothing has been trained yet, or the model has been compiled or
                changed since.
            NonFiniteError: an earlier update was not applied, and the error has not been raised
                yet.
        """
        if self.state is None and self.restored is not None:
            return self.restored  # nothing has been trained since
        if self.state is None or self.variables is None:
            must = "A snapshot needs a run that has begun."
            attempt = "take it after the first update of the trainer."
            attempt += " After updates by other code, model.save(path)."
            raise SpecificationError(message(must, "a trainer that has not trained", attempt))
        settle = self.settle()
        num_skipped = self.num_skipped if settle is None else settle()
        self._note_data()
        arrays = self.arrays(copied)
        groups = groups_of(self.variables)
        facts = {
            "format": 1,
            "number": self.number,
            "num_skipped": num_skipped,
            "begins": self.begins,
            "epochs": self.epochs,
            "place": asdict(self.place),
            "data": asdict(self.data),
            "layout": None if self.layout is None else self.layout.shapes,
            "findings": self.findings.as_json(),
            "also": {name: held.get_state() for name, held in self.also.items()},
            "paths": {k: [v.path for v in held] for k, held in groups.items()},
            "own": {
                path: keras.ops.convert_to_numpy(held)
                for path, held in self.own_variables().items()
            },
        }
        return Snapshot(arrays, to_json(facts, FACTS, arrays))

    def arrays(self, copied: Copied = own_copy) -> dict[str, Numbers]:
        """Return copies of all values that an update changes, by their names in a snapshot."""
        assert self.variables is not None
        groups = groups_of(self.variables)
        # The groups first: reading a variable brings the state up to date.
        arrays = {
            f"{k}/{i}": copied(f"{k}/{i}", _tensor(v))
            for k, held in groups.items()
            for i, v in enumerate(held)
        }
        assert self.state is not None
        # Not from Keras' metrics: an evaluation in between may have overwritten them.
        for name, held in (("sums", self.state.sums), ("running", self.state.metrics)):
            arrays |= {
                f"{name}/{i}": copied(f"{name}/{i}", _tensor(each)) for i, each in enumerate(held)
            }
        return arrays

    def restore(self, snapshot: Snapshot, *, goes_on: bool = True) -> None:
        """Resume from a snapshot of this or of another process.

        The model receives the values at once or, if it is not built yet, when the next call builds
        it. An interrupted `fit` or `steps` resumes when it is called again with the same data and
        the same number of epochs; the state of its callbacks is restored. Iterators and other
        streams are advanced to the saved position.

        Args:
            goes_on: whether the next call resumes the interrupted call; otherwise it starts a new
                one.

        Raises:
            SpecificationError: it is not a snapshot, it is another model's, or a call is in
                progress. The next call raises it if its method or its data differ from the
                interrupted call's.
        """
        if self.is_under_way:
            must = "A snapshot must be restored between calls."
            raise SpecificationError(
                message(must, f"restore during {self.place.call}", "end that call first.")
            )
        if not isinstance(snapshot, Snapshot) or snapshot.facts.get("format") != 1:
            must = "restore takes what snapshot() returned."
            raise SpecificationError(
                message(must, type(snapshot).__name__, "run.restore(run.snapshot()).")
            )
        facts = RunFacts.of(snapshot)
        before = self._as_it_is()
        self.state = None
        self.variables = None
        self.number = facts.number
        self.num_skipped = facts.num_skipped
        self.begins = facts.begins
        self.epochs = facts.epochs
        self.place = facts.place
        self.data = facts.data
        self.findings = facts.findings
        self.layout = None if facts.layout is None else ReportLayout(facts.layout)
        self.restored, self.also, self.assigned = snapshot, {}, WeakValueDictionary()
        if not goes_on:
            self.place = CallPosition()
        if (arrive := self.arrive()) is not None:
            try:
                arrive()
            except BaseException:
                # the model is unchanged; otherwise the next call assigns the rest
                if not self.assigned:
                    vars(self).update(before)
                raise

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Replace the restored snapshot by this copy, in which metrics are renamed."""
        if snapshot is not self.restored:
            facts = RunFacts.of(snapshot)
            self.layout = None if facts.layout is None else ReportLayout(facts.layout)
            self.place.logs, self.place.latest = facts.place.logs, facts.place.latest
            self.restored = snapshot

    def resume(self, call: str, batches: Batches, *, are_given: bool) -> Snapshot | None:
        """Return the snapshot from which this call resumes, if any, and move the batches to their
        position.

        Args:
            are_given: whether the user passed `Batches`, which keep their position; others start at
                the next epoch.

        Raises:
            SpecificationError, BatchError: the snapshot was taken in the other method, or with
                other data.
        """
        snapshot = self.restored
        self.also = {}
        if snapshot is None or not self.place.call:
            if not are_given:
                batches.seek(self.epochs)
            elif snapshot is not None and layout_of(batches) == self.data.layout:
                check_goes_on(self.place, self.data, self.place.call, batches, snapshot.source)
                advance_to(self.data, batches)
            self.restored, self.place, self.data = None, CallPosition(call), DataPosition()
            return None
        check_goes_on(self.place, self.data, call, batches, snapshot.source)
        advance_to(self.data, batches)
        return snapshot


def groups_of(variables: Variables) -> dict[str, list[keras.Variable]]:
    """Return the variables of a state by group."""
    return {name: list(getattr(variables, name)) for name in GROUPS}


def _tensor(value: Any) -> Tensor:
    """Return the value of one replica as a tensor that numpy does not copy.

    Keras' `convert_to_tensor` returns TensorFlow's variables unchanged, and numpy would copy them.
    """
    tensor = keras.ops.convert_to_tensor(value)
    return keras.ops.stop_gradient(tensor) if keras.backend.backend() == "tensorflow" else tensor
