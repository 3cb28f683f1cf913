"""Run: the state and position of a training."""

from collections.abc import Callable, Iterable, Iterator
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
from wholestep.errors import invalid
from wholestep.model import Findings
from wholestep.program import ALONE, EPOCH, GOES_ON
from wholestep.reports.report import ReportLayout
from wholestep.state import State, Variables
from wholestep.tree import Tensor

Copied = Callable[[str, Tensor], Numbers]


@dataclass
class Run:
    """The state and position of a training.

    It can be saved between any two blocks of updates, and restored elsewhere.

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
        count_skipped: a weak reference to the function that returns the number of skipped updates,
            or raises a NonFiniteError.
        apply_restored: a weak reference to the function that assigns a restored snapshot, as far
            as the model is built.
        find_engine_variables: a weak reference to the function that returns the engine's variables
            in attributes of the model, by path.
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
    count_skipped: Callable[[], Callable[[], int] | None] = lambda: None
    apply_restored: Callable[[], Callable[[], None] | None] = lambda: None
    find_engine_variables: Callable[[], Callable[[], dict[str, Any]] | None] = lambda: None
    restored: Snapshot | None = None
    assigned: WeakValueDictionary[int, keras.Variable] = field(default_factory=WeakValueDictionary)
    _batches: Batches | None = None

    @contextmanager
    def during_call(
        self,
        call: str,
        batches: Batches,
        *,
        are_given: bool,
        also: dict[str, Stateful] | None = None,
    ) -> Iterator[Snapshot | None]:
        """Context of one call of `fit` or `steps`. Yields the snapshot to resume from, if any.

        A call inside of another leaves the outer call's position unchanged.

        Args:
            are_given: see `resume`.
            also: other state that is saved with the run during the call and, if the call fails,
                until the next one.
        """
        outer = (self._batches, self.place, self.data, self.also)
        before = self._fields()
        try:
            snapshot = self.resume(call, batches, are_given=are_given)
            self.data.layout = layout_of(batches)
            batches.note_move()  # a loop over the same batches that has not ended must not go on
        except BaseException:
            vars(self).update(before)
            raise
        self._batches = batches
        self.also = also or {}
        try:
            yield snapshot
            self.also = {}
        finally:
            try:
                self._note_data()
            finally:
                self._batches = None
                if outer[0] is not None:
                    self._batches, self.place, self.data, self.also = outer

    def _fields(self) -> dict[str, Any]:
        """Return all attributes, with copies of `place` and `data`, which a call mutates."""
        return vars(self) | {"place": replace(self.place), "data": replace(self.data)}

    @property
    def is_in_call(self) -> bool:
        """Whether a call of `fit` or `steps` is in progress."""
        return self._batches is not None

    def _note_data(self) -> None:
        if self._batches is not None:
            note(self.data, self._batches)
            epoch, step = self.data.position
            self.epochs = max(self.epochs, epoch + (step > 0))

    def restore_also(self, snapshot: Snapshot) -> None:
        """Restore the other state that was saved with the run."""
        states = from_json(snapshot.facts["also"], snapshot.arrays)
        for name, state in states.items():
            if name in self.also:
                self.also[name].set_state(state)

    # ---- further changes of a run: no other module assigns to its attributes ----

    def connect(
        self,
        count_skipped: Callable[[], Any],
        apply_restored: Callable[[], Any],
        find_engine_variables: Callable[[], Any],
    ) -> None:
        """Set these weak references."""
        self.count_skipped = count_skipped
        self.apply_restored = apply_restored
        self.find_engine_variables = find_engine_variables

    def engine_variables(self) -> dict[str, Any]:
        """Return the engine's variables in the model's attributes, by path.

        They are no part of the state, but of a snapshot.
        """
        find = self.find_engine_variables()
        return {} if find is None else find()

    def set_state(
        self, state: State, variables: Variables | None = None, *, begins: int | None = None
    ) -> None:
        """Set the values that the next update spends.

        Args:
            variables: the variables of these values; None if they are the same.
            begins: how the next update begins; None: as before.
        """
        self.state = state
        if variables is not None:
            self.variables = variables
        if begins is not None:
            self.begins = begins

    def count_sent(self, num: int, layout: ReportLayout, *, in_call: bool) -> None:
        """Count updates that were sent; single updates belong to no epoch of a call."""
        self.number = self.number + num
        self.begins = GOES_ON
        self.layout = layout
        if in_call:
            self.place.done += num

    def move_before(self, number: int, *, in_call: bool) -> None:
        """Move back to before update `number`, which was not applied; nor was any after it."""
        if in_call:
            self.place.done -= self.number + 1 - number
        self.number = number - 1

    def set_counts(self, number: int, num_skipped: int) -> None:
        """Set the number of the last update, and the number of skipped updates."""
        self.number = number
        self.num_skipped = num_skipped

    def note_last(self, digest: str, state: Any, logs: dict[str, Any] | None = None) -> None:
        """Record the last batch's digest, the stream's state after it, the last update's logs.

        Args:
            logs: None to keep the recorded ones.
        """
        self.data.last = digest
        self.data.state = state
        if logs is not None:
            self.place.latest = logs

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
            raise invalid(
                "A snapshot needs a run that has begun.",
                "a trainer that has not trained",
                "take it after the first update of the trainer. After updates by other code, "
                "model.save(path).",
            )
        count_skipped = self.count_skipped()
        num_skipped = self.num_skipped if count_skipped is None else count_skipped()
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
            "also": {name: part.get_state() for name, part in self.also.items()},
            "paths": {name: [v.path for v in variables] for name, variables in groups.items()},
            "own": {
                path: keras.ops.convert_to_numpy(variable)
                for path, variable in self.engine_variables().items()
            },
        }
        return Snapshot(arrays, to_json(facts, FACTS, arrays))

    def arrays(self, copied: Copied = own_copy) -> dict[str, Numbers]:
        """Return copies of all values that an update changes, by their names in a snapshot."""
        arrays: dict[str, Numbers] = {}

        def add(group: str, values: Iterable[Any]) -> None:
            for i, value in enumerate(values):
                name = f"{group}/{i}"
                arrays[name] = copied(name, _tensor(value))

        assert self.variables is not None
        # The variables first: reading them brings the state up to date.
        for group, variables in groups_of(self.variables).items():
            add(group, variables)
        assert self.state is not None
        # Not from Keras' metrics: an evaluation in between may have overwritten them.
        add("sums", self.state.sums)
        add("running", self.state.metrics)
        add("failures", self.state.failures)
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
        if self.is_in_call:
            raise invalid(
                "A snapshot must be restored between calls.",
                f"restore during {self.place.call}",
                "end that call first.",
            )
        if not isinstance(snapshot, Snapshot) or snapshot.facts.get("format") != 1:
            raise invalid(
                "restore takes what snapshot() returned.",
                type(snapshot).__name__,
                "run.restore(run.snapshot()).",
            )
        facts = RunFacts.of(snapshot)
        layout = _layout_of(facts)
        place = facts.place if goes_on else CallPosition()
        assigned: WeakValueDictionary[int, keras.Variable] = WeakValueDictionary()
        before = self._fields()
        # No call in between, which could be interrupted.
        self.state = None
        self.variables = None
        self.number = facts.number
        self.num_skipped = facts.num_skipped
        self.begins = facts.begins
        self.epochs = facts.epochs
        self.place = place
        self.data = facts.data
        self.findings = facts.findings
        self.layout = layout
        self.restored = snapshot
        self.also = {}
        self.assigned = assigned
        apply_restored = self.apply_restored()
        if apply_restored is None:
            return
        try:
            apply_restored()
        except BaseException:
            # the model is unchanged; otherwise the next call assigns the rest
            if not self.assigned:
                vars(self).update(before)
            raise

    def use_renamed(self, snapshot: Snapshot) -> None:
        """Replace the restored snapshot by this copy, in which metrics are renamed."""
        if snapshot is not self.restored:
            facts = RunFacts.of(snapshot)
            self.layout = _layout_of(facts)
            self.place.logs = facts.place.logs
            self.place.latest = facts.place.latest
            self.restored = snapshot

    def resume(self, call: str, batches: Batches, *, are_given: bool) -> Snapshot | None:
        """Return the snapshot from which this call resumes, if any; move the batches there.

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


def _layout_of(facts: RunFacts) -> ReportLayout | None:
    return None if facts.layout is None else ReportLayout(facts.layout)


def groups_of(variables: Variables) -> dict[str, list[keras.Variable]]:
    """Return the variables of a state by group."""
    return {name: list(getattr(variables, name)) for name in GROUPS}


def _tensor(value: Any) -> Tensor:
    """Return the value of one replica as a tensor that numpy does not copy.

    Keras' `convert_to_tensor` returns TensorFlow's variables unchanged, and numpy would copy them.
    """
    tensor = keras.ops.convert_to_tensor(value)
    return keras.ops.stop_gradient(tensor) if keras.backend.backend() == "tensorflow" else tensor
