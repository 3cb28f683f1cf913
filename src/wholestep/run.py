"""Run: where a training stands, and the one loop through which everything moves on."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import keras

from wholestep.checkpoints.data import check_goes_on, go_to, note
from wholestep.checkpoints.pieces import Numbers, own_copy
from wholestep.checkpoints.place import DataPlace, Keeps, Place
from wholestep.checkpoints.snapshot import FACTS, GROUPS, RunFacts, Snapshot, put_together, taken_apart
from wholestep.data.batches import Batches
from wholestep.data.block import Block
from wholestep.data.facts import layout_of
from wholestep.data.feed import Feed
from wholestep.dispatch.repeat import ALONE, EPOCH, GOES_ON
from wholestep.errors import SpecificationError, message
from wholestep.model.findings import Findings
from wholestep.reports.layout import ReportLayout
from wholestep.state import State, Variables
from wholestep.tree import Tensor

At = TypeVar("At", contravariant=True)
Sent = TypeVar("Sent", covariant=True)
Copied = Callable[[str, Tensor], Numbers]


@dataclass
class Run:
    """Where a training stands. Between any two blocks of updates it can be taken out, and put back elsewhere.

    Args:
        state: what the next update spends; None before the first.
        number: the number of the last update: the optimizer's `iterations`, and how many updates were skipped.
        num_skipped: the updates that were left out because they were not finite.
        begins: how the next update begins, see `wholestep.dispatch.repeat.span`.
        variables: whose values the state holds; another executor's state is of no use.
        epochs: how many epochs of data have begun: the next call takes the order of another one.
        place: where the call stands that moves the run.
        data: where the data of the last call stood at its end.
        layout: of what is added up in the epoch, once an update has been sent.
        findings: what was found out by trying.
        also: what else goes with the run, by name.
        settle: holds weakly what counts the updates that were left out, and tells of one that was not applied.
        arrive: holds weakly what puts a restored snapshot into the model, as far as the model is built.
        restored: the snapshot that the next call goes on from.
        assigned: by their ids, the variables that have got their values from it, and may have been set since.

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
    place: Place = field(default_factory=Place)
    data: DataPlace = field(default_factory=DataPlace)
    layout: ReportLayout | None = None
    findings: Findings = field(default_factory=Findings)
    also: dict[str, Keeps] = field(default_factory=dict)
    settle: Callable[[], Callable[[], int] | None] = lambda: None
    arrive: Callable[[], Callable[[], None] | None] = lambda: None
    restored: Snapshot | None = None
    assigned: WeakValueDictionary[int, keras.Variable] = field(default_factory=WeakValueDictionary)
    _batches: Batches | None = None

    @contextmanager
    def under_way(
        self, call: str, batches: Batches, *, are_given: bool, also: dict[str, Keeps] | None = None
    ) -> Iterator[Snapshot | None]:
        """Let a call move the run, and yield what `resume` returns; a call around this one stands where it stood.

        Args:
            also: what is taken out with the run for as long as the call moves it, and if it fails, until the next one.
        """
        outer, before = (self._batches, self.place, self.data, self.also), self._as_it_is()
        try:
            resumed = self.resume(call, batches, are_given=are_given)
            self.data.layout = layout_of(batches)
        except BaseException:
            vars(self).update(before)
            raise
        self._batches, self.also = batches, also or {}
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
        """Return the values of all attributes, with copies of those that a call changes in place."""
        return vars(self) | {"place": replace(self.place), "data": replace(self.data)}

    @property
    def is_under_way(self) -> bool:
        """Whether a call moves the run."""
        return self._batches is not None

    def _note_data(self) -> None:
        if self._batches is not None:
            note(self.data, self._batches)
            epoch, step = self.data.position
            self.epochs = max(self.epochs, epoch + (step > 0))

    def put_back_also(self, snapshot: Snapshot) -> None:
        """Let all that goes with the run go on from a snapshot."""
        for name, state in put_together(snapshot.facts["also"], snapshot.arrays).items():
            if name in self.also:
                self.also[name].set_state(state)

    # ---- what moves a run, beside `under_way` and `restore`: no other module assigns to it ----

    def connect(self, settle: Callable[[], Any], arrive: Callable[[], Any]) -> None:
        """Take the two functions, held weakly, that read unread updates and assign a restored snapshot."""
        self.settle, self.arrive = settle, arrive

    def hold(self, state: State, variables: Variables | None = None, *, begins: int | None = None) -> None:
        """Hold the values that the next update spends, of other variables or with another beginning where given."""
        self.state = state
        self.variables = self.variables if variables is None else variables
        self.begins = self.begins if begins is None else begins

    def sent(self, num: int, layout: ReportLayout, *, in_call: bool) -> None:
        """Count updates that were sent; those of `update` belong to no epoch of a call."""
        self.number, self.begins, self.layout = self.number + num, GOES_ON, layout
        self.place.done += num if in_call else 0

    def failed(self, number: int, *, in_call: bool) -> None:
        """Go back to before an update that was not applied, nor any after it."""
        self.place.done -= self.number + 1 - number if in_call else 0
        self.number = number - 1

    def counted(self, number: int, num_skipped: int) -> None:
        """Set the number of the last update and how many were skipped, as the optimizer and the reports have them."""
        self.number, self.num_skipped = number, num_skipped

    def noted(self, last: str, state: Any, latest: dict[str, Any] | None = None) -> None:
        """Keep the digest of the last batch and the stream's state after it; the last update's numbers, if given."""
        self.data.last, self.data.state = last, state
        self.place.latest = self.place.latest if latest is None else latest

    def begin_update(self) -> None:
        """Let the next update be an epoch by itself, with empty sums and metrics."""
        self.begins = ALONE

    def begin_epoch(self, epoch: int, position: tuple[int, int]) -> None:
        """Move the call to the beginning of an epoch."""
        self.place = Place(self.place.call, epoch, began=position[0])

    def open_epoch(self) -> None:
        """Note that the callbacks have seen the epoch begin."""
        self.place.is_open = True

    def end_updates(self, latest: dict[str, Any]) -> None:
        """Keep the logs of the last update of an epoch, whose validation may follow."""
        self.place.latest = latest

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Keep the logs of an epoch whose updates and validation have run."""
        self.place.logs = logs

    def end_hook(self) -> None:
        """Count a callback that has seen the epoch end."""
        self.place.told += 1

    def end_call(self) -> None:
        """Move the run to between calls."""
        self.restored, self.place = None, Place()

    def has_resumed(self) -> None:
        """Drop the snapshot from which the run has resumed."""
        self.restored = None

    def adopt(self, findings: Findings) -> None:
        """Plan by other findings from now on."""
        self.findings = findings

    def drop(self) -> None:
        """Drop the values: the next call assigns those of the restored snapshot that are not assigned yet."""
        self.state = self.variables = None

    def snapshot(self, copied: Copied = own_copy) -> Snapshot:
        """Return where the training stands. Waits for the device.

        Arrays are the parameters ("params/0", ...), the optimizer's variables ("slots/..."), moving statistics, seeds
        and whatever else is no parameter ("buffers/..."), the metrics, and the sums of the epoch. Everything else is
        JSON. A snapshot may be taken between calls, between two steps, after a failure, and in any hook of a callback.
        In the hooks of a batch, the callbacks after this one in the list have not been told of the batch: let this one
        be the last.

        Args:
            copied: returns a copy of a value that is to be kept, by its name.

        Raises:
            SpecificationError: nothing has been trained yet, or the model has been compiled since.
            NonFiniteError: an update before this was not applied, and nobody has seen so.
        """
        if self.state is None and self.restored is not None:
            return self.restored  # nothing has moved since
        settle = self.settle()
        num_skipped = self.num_skipped if settle is None else settle()
        if self.state is None or self.variables is None:
            must = "A snapshot needs a run that has begun."
            raise SpecificationError(message(must, "a trainer that has not trained", "take it after the first update."))
        self._note_data()
        arrays, groups = self.arrays(copied), groups_of(self.variables)
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
        }
        return Snapshot(arrays, taken_apart(facts, FACTS, arrays))

    def arrays(self, copied: Copied = own_copy) -> dict[str, Numbers]:
        """Return copies of all values that an update changes, by their names in a snapshot."""
        assert self.variables is not None
        groups = groups_of(self.variables)
        # The groups first: to read a variable brings the state up to date.
        arrays = {f"{k}/{i}": copied(f"{k}/{i}", _tensor(v)) for k, held in groups.items() for i, v in enumerate(held)}
        assert self.state is not None
        # What Keras' metrics show is another's, where an evaluation has been in between.
        for name, held in (("sums", self.state.sums), ("running", self.state.metrics)):
            arrays |= {f"{name}/{i}": copied(f"{name}/{i}", _tensor(each)) for i, each in enumerate(held)}
        return arrays

    def restore(self, snapshot: Snapshot, *, goes_on: bool = True) -> None:
        """Go on from a snapshot, which may be another process'.

        The model has the values at once, and a model that is not built yet has them when the next call builds it. A
        `fit` or `steps` that was left in the middle goes on there when it is called with the same arguments: with the
        same data, to the same number of epochs, and with what its callbacks have seen. Iterators and other streams run
        forward to where they were.

        Args:
            goes_on: whether the next call goes on in the middle of the one that was left; else it begins anew.

        Raises:
            SpecificationError: it is no snapshot, it is another model's, or a call is under way; by the next call, if
                that is `fit`, to go on with `steps`.
        """
        if self.is_under_way:
            must = "A snapshot is restored between calls."
            raise SpecificationError(message(must, f"a call of {self.place.call} under way", "leave its loop first."))
        if not isinstance(snapshot, Snapshot) or snapshot.facts.get("format") != 1:
            must = "restore takes what snapshot() returned."
            raise SpecificationError(message(must, type(snapshot).__name__, "run.restore(run.snapshot())."))
        facts, before = RunFacts.of(snapshot), self._as_it_is()
        self.state, self.variables = None, None
        self.number, self.num_skipped, self.begins = facts.number, facts.num_skipped, facts.begins
        self.epochs, self.place, self.data, self.findings = facts.epochs, facts.place, facts.data, facts.findings
        self.layout = None if facts.layout is None else ReportLayout(facts.layout)
        self.restored, self.also, self.assigned = snapshot, {}, WeakValueDictionary()
        if not goes_on:
            self.place = Place()
        if (arrive := self.arrive()) is not None:
            try:
                arrive()
            except BaseException:
                if not self.assigned:  # the model is as it was; otherwise the next call assigns the rest
                    vars(self).update(before)
                raise

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Go on from this snapshot instead of the one that was restored, of which it is a copy with other names."""
        if snapshot is not self.restored:
            facts = RunFacts.of(snapshot)
            self.layout = None if facts.layout is None else ReportLayout(facts.layout)
            self.place.logs, self.place.latest = facts.place.logs, facts.place.latest
            self.restored = snapshot

    def resume(self, call: str, batches: Batches, *, are_given: bool) -> Snapshot | None:
        """Return the snapshot in the middle of which this call goes on, if any, with the batches where they were.

        Args:
            are_given: whether the batches are the user's own, and stand where the user left them; else they begin with
                the next epoch.

        Raises:
            SpecificationError: the snapshot was taken in a call of another kind, or with other data.
        """
        snapshot, self.also = self.restored, {}
        if snapshot is None or not self.place.call:
            if not are_given:
                batches.seek(self.epochs)
            elif snapshot is not None and layout_of(batches) == self.data.layout:
                check_goes_on(self.place, self.data, self.place.call, batches)
                go_to(self.data, batches)
            self.restored, self.place, self.data = None, Place(call), DataPlace()
            return None
        check_goes_on(self.place, self.data, call, batches)
        go_to(self.data, batches)
        return snapshot


def groups_of(variables: Variables) -> dict[str, list[keras.Variable]]:
    """Return the variables of a state, by what they are."""
    return {name: list(getattr(variables, name)) for name in GROUPS}


def _tensor(value: Any) -> Tensor:
    """Return the value of one replica as a tensor that numpy does not copy.

    Keras' `convert_to_tensor` hands TensorFlow's variables through, which numpy would copy.
    """
    tensor = keras.ops.convert_to_tensor(value)
    return keras.ops.stop_gradient(tensor) if keras.backend.backend() == "tensorflow" else tensor


class Sends(Protocol[At, Sent]):
    """Sends blocks to the device: an executor's updates, or an evaluation's batches."""

    def send(self, run: At, feed: Feed, block: Block) -> Sent:
        """Send a block and move the run; return the block's report, or an evaluation's results."""


def updates(
    line: Sends[At, Sent],
    run: At,
    feed: Feed,
    num: int | None,
    size: Callable[[], int],
    *,
    once: bool = False,
    before: Callable[[], bool | None] = lambda: None,
    ahead: Callable[[], int] | None = None,
) -> Generator[Sent, None, None]:
    """Carry out the updates that a feed yields; yield what tells of each block as soon as the block is sent.

    An evaluation's batches, which update nothing, go the same way. Between any two blocks the run may be taken out.

    Args:
        num: how many updates (None: to the end of the epoch).
        size: how many may go in the next dispatch.
        once: whether they end with the epoch in any case.
        before: called before a block is sent, where the run may be taken out; False ends the loop.
        ahead: if somebody may look at the state after each block, how many would be sent at once all the same.
    """
    for block in feed.blocks(num, size, once=once, ahead=ahead):
        if before() is False:
            return
        sent = line.send(run, feed, block)
        feed.note_sent(block)
        yield sent
