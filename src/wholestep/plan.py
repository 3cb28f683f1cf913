"""How an update is carried out: microbatches, padding, updates per dispatch. Never what it computes."""

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np

from wholestep import tree
from wholestep.coupling import Coupling, inference, metrics_are_additive, metrics_ignore_padding, probe
from wholestep.cut import Cut
from wholestep.data.feed import Block, stage
from wholestep.embeddings import describe
from wholestep.errors import SpecificationError, message
from wholestep.state import State
from wholestep.update import Update

_MOST_UPDATES = 256
_MOST_ROW_NUMBERS = 1 << 20


@dataclass(frozen=True)
class Program:
    """A compiled program for updates of one shape, and how it carries them out."""

    call: Callable
    cut: Cut
    length: int
    memory: int | None
    tables: list[str]
    captured: list[keras.Variable]
    how: str


@dataclass
class Planner:
    """Plans and compiles the programs of one step, each once.

    Args:
        microbatch_size: rows in a microbatch, or "auto": the largest that fits in `memory_limit`.
        memory_limit: bytes that a program may use beside its arguments; None for the device's, or half of the
            host's.
        pads: whether every metric can be told to leave rows out; None if that must be tried.
        programs: by what a block looks like.
        coupling: what couples the rows; None if that must be tried.
        adds: whether the states of the metrics are sums over rows; None if that must be tried.
    """

    engine: Any
    update: Update
    microbatch_size: int | str
    memory_limit: int | None
    pads: bool | None
    programs: dict = field(default_factory=dict)
    coupling: Coupling | None = None
    adds: bool | None = None
    _learned: tuple | None = None
    _signed: tuple[Any, tuple] = (None, ())

    def program(self, state: State, block: Block, *, short: bool, most: int) -> Program:
        """Return the program for updates such as those of this block.

        Args:
            short: whether shorter updates may come, to be filled up with rows of weight 0.
            most: how many updates will be wanted in one dispatch.
        """
        program = self.known(block, short=short, most=most)
        if program is None:
            self.engine.processes.set_status("compiling")
            program = self._plan(state, block, short, _length(block, most))
            self.programs[self._key(block, short, most)] = program
        return program

    def known(self, block: Block, *, short: bool, most: int) -> Program | None:
        """Return the same program, if there has been such a block; None else."""
        return self.programs.get(self._key(block, short, most))

    def _key(self, block: Block, short: bool, most: int) -> tuple:
        length, num_buffers = _length(block, most), len(self.update.forward.variables.buffers)
        return self._signature(block), block.rows.shape[1], short, length > 1, num_buffers

    def _signature(self, block: Block) -> tuple:
        """Return names, shapes and dtypes of a block's data; those of resident arrays stay as they are."""
        if not block.is_resident:
            return _signature(block)
        if self._signed[0] is not block.host:
            self._signed = block.host, _signature(block)
        return self._signed[1]

    def learn(self, state: State, block: Block) -> State:
        """Find out what the objective reads and assigns besides the model's variables, once, before anything else."""
        if self.update.forward.is_traced:
            return state
        num_rows = block.rows.shape[1]
        cut = Cut(((1, num_rows),), num_rows, split=self.engine.is_split)
        data, rows = stage(self.engine, block, cut)
        return self._learn(cut, state, block, data, *self.engine.place((rows[0], np.int32(num_rows))))

    def _learn(self, cut: Cut, state: State, block: Block, data: Any, rows: Any, count: Any) -> State:
        """Do the same for a microbatch of this cut, unless the last trace was of one like it."""
        forward, like = self.update.forward, (cut.sections[0][1], cut.padded, self._signature(block))
        if self._learned == like and not forward.written:
            return state._replace(captured=self.engine.read_captured(forward.inputs, state))
        self._learned = None
        state = forward.learn(self.engine, state, partial(self.update.learn, cut, data=data, rows=rows, count=count))
        self._learned = like
        return state

    def padding_is_exact(self, state: State, block: Block) -> bool:
        """Whether rows of weight 0 change nothing. Probes the objective and the metrics, once."""
        if self.pads is False or not self.probe(state, block).padding_is_exact:
            return False
        if self.pads is None:
            self._learned = None
            self.pads = self._share(metrics_ignore_padding(self.engine, self.update.forward, state, block))
        return self.pads

    def metrics_are_additive(self, state: State, block: Block) -> bool:
        """Whether the states of the metrics are sums over rows. Tries it, once."""
        if self.adds is None:
            self._learned = None
            self.adds = self._share(metrics_are_additive(self.engine, self.update.forward, state, block))
        return self.adds

    def probe(self, state: State, block: Block) -> Coupling:
        """Return what couples the rows, found out once."""
        if self.coupling is not None:
            return self.coupling
        found = self._probe(state, block)
        self.coupling = found if block.rows.shape[1] > 1 else None  # one row tells nothing of others
        return found

    @cached_property
    def limit(self) -> int:
        """The bytes that a program may use beside its arguments, the same in all processes."""
        return self._share(self.memory_limit or self.engine.device_bytes() or _host_bytes() // 2)

    @cached_property
    def room_for_data(self) -> int:
        """The bytes that arrays may take which stay on the device, whatever a program may use."""
        return self._share((self.engine.device_bytes() or _host_bytes() // 2) // 2)

    @property
    def pads_short(self) -> bool | None:
        """Whether short batches are filled up with rows of weight 0; None if that has not been tried."""
        if self.pads is False or (self.coupling is not None and not self.coupling.padding_is_exact):
            return False
        return None if self.coupling is None else self.pads

    def _share(self, found: Any) -> Any:
        """Return what process 0 found: of measured and tried things, all processes must conclude the same."""
        return self.engine.processes.broadcast(found)

    def _probe(self, state: State, block: Block) -> Coupling:
        self._learned = None  # what a probe traces says other facts of the same objective
        return Coupling(**self._share(asdict(probe(self.engine, self.update.forward, state, block))))

    def _plan(self, state: State, block: Block, short: bool, length: int) -> Program:
        num_rows = block.rows.shape[1]
        split = self.engine.is_split
        whole = Cut(((1, num_rows),), num_rows, padded=short and self.pads is not False, split=split)
        if split:
            whole = replace(whole, extra=self._shared_extra(state, block))
        if num_rows % self.engine.num_replicas and self.padding_is_exact(state, block):
            whole = replace(whole, sections=((1, self._even(num_rows)),), padded=True)
        if self.microbatch_size != "auto":
            cut = self._cut(whole, int(self.microbatch_size), state, block)
            return self._compile(cut, length, state, block)
        program = self._compile(whole, length, state, block)
        if program.memory is None and self.memory_limit is not None:
            self._say(f"memory_limit has no effect: {self.engine.name} does not tell what a program needs.")
        size = num_rows
        while program.memory is not None and program.memory > self.limit and size > 1:
            if not self.probe(state, block).cut_is_exact:
                self._say(f"The batch is not cut to fit in {self.limit} bytes: {self.probe(state, block).why}.")
                return program
            size = -(-size // 2)
            program = self._compile(self._cut(whole, size, state, block), length, state, block)
        if program.memory is not None and program.memory > self.limit:
            self._say(
                f"Even one row at a time needs {program.memory} bytes, and may use {self.limit}: the update is carried "
                "out all the same. Raise memory_limit, or make the model smaller."
            )
        return program

    def _cut(self, whole: Cut, size: int, state: State, block: Block) -> Cut:
        if size >= whole.rows:
            return whole
        coupling = self.probe(state, block)
        if not coupling.cut_is_possible:
            self._say(f"microbatch_size={size} has no effect: {coupling.why}. Every update runs as a whole.")
            return whole
        num = -(-whole.rows // size)
        if self.padding_is_exact(state, block):
            size = self._even(-(-whole.rows // num))
            split = self._may_split(whole, [size], state, block)
            return Cut(((num, size),), whole.rows, padded=whole.padded or num * size != whole.rows, split=split)
        if not coupling.cut_is_exact:
            self._say(
                f"microbatch_size={size} is part of what this update means: {coupling.why}. {coupling.cut_means} "
                f"A microbatch has at most {size} rows; leave microbatch_size out to compute the batch as a whole."
            )
        small, larger = divmod(whole.rows, num)
        sections = tuple(s for s in ((larger, small + 1), (num - larger, small)) if s[0])
        extra = whole.extra if whole.split else "mean" if coupling.extra == "mean" else "sum"
        split = coupling.cut_is_exact and self._may_split(whole, [size for _, size in sections], state, block)
        return Cut(sections, whole.rows, extra=extra, split=whole.split or split)

    def _may_split(self, whole: Cut, sizes: list[int], state: State, block: Block) -> bool:
        """Whether each replica may fold its own rows of microbatches of such sizes, which may be cut anyhow."""
        num = self.engine.num_replicas
        if whole.split or not self.engine.can_split or any(size % num for size in sizes):
            return whole.split
        return self.metrics_are_additive(state, block)

    def _shared_extra(self, state: State, block: Block) -> str:
        """Return how other losses add up over replicas that see their own rows alone.

        Raises:
            SpecificationError: something depends on the rows of all replicas together.
        """
        coupling = self.probe(state, block)
        if coupling.cut_is_possible and not coupling.cut_is_exact:
            with inference(self.engine.coupling_layers):
                coupling = self._probe(state, block)
        why = "" if coupling.cut_is_exact else coupling.why
        if not why and not self.metrics_are_additive(state, block):
            why = "a metric's state is not a sum over rows"
        if why:
            must = "Under tf.distribute every replica sees its own rows alone, and what it finds must add up."
            raise SpecificationError(message(must, why, "the JAX engine, where replicas share one array of all rows."))
        return "mean" if coupling.extra == "mean" else "sum"

    def _even(self, size: int) -> int:
        """Return the next size that the replicas can share equally."""
        num = self.engine.num_replicas
        return -(-size // num) * num

    def _compile(self, cut: Cut, length: int, state: State, block: Block) -> Program:
        engine, maker = self.engine, self.update
        data, rows = stage(engine, block, cut)
        places, count = engine.place((rows[0], np.int32(cut.rows)))
        state = self._learn(cut, state, block, data, places, count)
        if cut.padded and maker.forward.cannot_pad:
            cut = replace(cut, padded=False)
            state = self._learn(cut, state, block, data, places, count)
        state = state._replace(sums=engine.place(maker.epoch_sums.empty()))
        row_plan, wholes = maker.row_plan(cut, state, data, places)
        cut = replace(cut, split=False) if row_plan.tables else cut  # which need the lookups of all replicas
        update = maker.whole_update(cut, row_plan)
        one = (state, data, places, count)
        length = 1 if engine.loops_slowly(update, *one) else length
        loops = length > 1 or engine.always_xla
        run = maker.run(update, length, one, loops=loops)
        none = (np.zeros((length, cut.places), np.int32), np.zeros((length,), np.int32), np.int32(0))
        captured, values = maker.forward.inputs, state.captured
        example = state._replace(captured=()), values, data, *engine.numbers(*none)
        call = engine.compile(run, example, repeats=loops)
        needs = self._share(engine.memory(call))
        tables = describe(row_plan, wholes, cut.num_microbatches)
        return Program(call, cut, length, needs, tables, captured, engine.describe(call))

    def _say(self, message: str) -> None:
        warnings.warn(message, UserWarning, stacklevel=2)


def _length(block: Block, most: int) -> int:
    """Return how many updates a program for such blocks carries out at most."""
    return max(1, min(most, _MOST_UPDATES, _MOST_ROW_NUMBERS // block.rows.shape[1]))


def _signature(block: Block) -> tuple:
    shapes = [(label, tuple(leaf.shape), str(leaf.dtype)) for label, leaf in tree.named_leaves(block.host)]
    return tuple((label, shape if block.is_resident else shape[1:], dtype) for label, shape, dtype in shapes)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def explain(planner: Planner, sharded: list[str], data: str) -> str:
    """Return how an update is carried out, in plain words.

    Args:
        sharded: the variables that no device holds whole.
        data: where the data are, in words.
    """
    engine, coupling, program = planner.engine, planner.coupling, list(planner.programs.values())[-1]
    cut = program.cut
    parts = " and ".join(f"{num} x {size} rows" for num, size in cut.sections)
    several = len(planner.programs)
    lines = [
        *([f"{several} programs for updates of several shapes; the last one made:"] if several > 1 else []),
        f"One update takes {cut.rows} rows"
        + (f" in {cut.num_microbatches} microbatches ({parts})." if cut.num_microbatches > 1 else " at once."),
        *_spread(cut, engine),
        _padding(cut, planner.pads_short),
        *([data] if data else []),
        f"Up to {program.length} updates go to the device in one dispatch ({engine.name})."
        if program.length > 1
        else f"Each update is a dispatch of its own ({engine.name}).",
    ]
    lines += [program.how] if program.how else []
    if sharded:
        lines.append(f"Sharded, never gathered for the update: {', '.join(sharded)}.")
    if program.memory is not None:
        needs, limit = program.memory / 2**20, planner.limit / 2**20
        lines.append(f"The program needs {needs:.1f} MiB beside the data and the weights, of {limit:.0f} it may use.")
    lines += program.tables
    if coupling is not None:
        lines.append(
            "Cutting changes nothing in this model." if coupling.cut_is_exact else f"Not cut freely: {coupling.why}."
        )
    return "\n".join(lines)


def _spread(cut: Cut, engine: Any) -> list[str]:
    """Return how the rows are spread over hosts and replicas, if they are."""
    replicas, hosts = engine.num_replicas, engine.processes.count
    if replicas == 1:
        return []
    shares = " and ".join(f"{num} microbatches x {-(-size // replicas)} rows" for num, size in cut.sections)
    many = f"{hosts} {'host' if hosts == 1 else 'hosts'} x {replicas / hosts:g} replicas"
    lines = [f"{cut.places} places = {many} x {shares}."]
    if cut.split:
        return [*lines, "Each replica sums over its own rows; the sums of all go over the wire once an update."]
    return [*lines, "Arrays are global: every replica sees the statistics of all rows."]


def _padding(cut: Cut, pads_short: bool | None) -> str:
    extra = cut.places - cut.rows
    lines = [f"The last {extra} places are padding of weight 0."] if extra else []
    if not cut.padded:
        return "".join(lines) or "No row is padding."
    shorter = {
        True: "Shorter batches are filled up with rows of weight 0.",
        False: "Shorter batches run in their own shape, as padding would count.",
        None: "Whether shorter batches can be filled up with rows of weight 0 is tried when one comes.",
    }
    return " ".join([*lines, shorter[pads_short]])
