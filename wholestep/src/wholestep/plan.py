"""The plan of an update: microbatches, padding, updates per dispatch.

A plan changes only rounding, unless it warns.
"""

import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import keras
import numpy as np

from wholestep.cut import Cut
from wholestep.data import Batch, Batches, most_in_a_dispatch, stack, stage
from wholestep.embeddings.rows import describe
from wholestep.engines import Engine
from wholestep.errors import SpecificationError, message, warn
from wholestep.model import (
    Coupling,
    Findings,
    Forward,
    inference,
    joining,
    metrics_are_additive,
    metrics_ignore_padding,
    probe,
)
from wholestep.program import MOST_UPDATES, FeedSpec, Program, ProgramCache, compiled
from wholestep.state import State
from wholestep.tree import Tensor
from wholestep.update import ObjectiveUpdate, Update

_MOST_ROW_NUMBERS = 1 << 20
_MOST_KINDS_LOOPED = 4


class Sample(NamedTuple):
    """A batch by which an update is planned.

    Args:
        update: the update traced for such batches.
        state: the state before it.
    """

    update: Update
    state: State
    batch: Batch

    @property
    def traced(self) -> tuple[Forward, State, Batch]:
        """The forward pass, the state and the batch."""
        return self.update.forward, self.state, self.batch


@dataclass
class Planner:
    """Plans and compiles the programs of one update, each once while the cache holds it.

    Args:
        microbatch_size: rows in a microbatch, or "auto": the largest that fits in `memory_limit`.
        memory_limit: bytes that a program may use in addition to its arguments; None for three
            quarters of the device's free memory, or half of the host's.
        findings: the measurements of the run, which the planner completes.
        update: the update before a trace; it knows the variables of the state.
        empty: the metrics' values before the first row; None until an epoch has begun.
        programs: the programs by the shape of an update.
    """

    engine: Engine
    update: Update
    microbatch_size: int | str
    memory_limit: int | None
    findings: Findings
    empty: list[np.ndarray] | None = None
    programs: ProgramCache = field(default_factory=ProgramCache)
    _updates: ProgramCache = field(default_factory=ProgramCache)
    # the same by the shape of a batch before it is padded
    _filled: ProgramCache = field(default_factory=ProgramCache)

    def adopt(self, findings: Findings) -> None:
        """Plan by the findings of a restored run; drop the programs of different findings."""
        if not findings.plans_as(self.findings):
            self.programs.clear()
            self._filled.clear()
        self.findings = findings
        joined = self._with_joined_losses()
        if findings.coupling is not None and findings.coupling.joins and joined is not self.update:
            self._use(joined)

    def note_no_xla(self) -> None:
        """Note why programs are not compiled by XLA, as the engine has found."""
        self.findings.why_no_xla = self.engine.programs.why_no_xla

    def wanted(self, batches: Batches | None, *, singly: bool = False) -> FeedSpec:
        """Return the common properties of all updates on these batches; None: single batches.

        Args:
            singly: see `FeedSpec`. Not where a program of one update has other bits.
        """
        if batches is None:
            return FeedSpec(True, 1, 0)
        loops_once = self.engine.programs.loops_once
        num_shapes = len(batches.shapes)
        most = MOST_UPDATES if loops_once or num_shapes < 2 else 1
        if batches.arrays is not None and not num_shapes:
            most = len(batches)
        return FeedSpec(batches.has_short_batch, most, num_shapes, singly and loops_once)

    def known(self, batch: Batch, wanted: FeedSpec) -> Program | None:
        """Return the known program for updates like this one; None if there is none."""
        return self._filled.get((self._key(batch, wanted), batch.full))

    def filled(self, sample: Sample, wanted: FeedSpec) -> Sample:
        """Return the sample, padded to a full batch if it is short and padding is exact."""
        batch = sample.batch
        is_short = batch.num_rows < batch.full
        if not is_short and not wanted.num_shapes:
            return sample
        may_fill = self.padding_is_exact(sample)
        return sample._replace(batch=batch.padded(batch.full)) if is_short and may_fill else sample

    def is_new(self, filled: Batch, wanted: FeedSpec) -> bool:
        """Whether no program for such updates has been compiled."""
        return self._key(filled, wanted) not in self.programs

    def program(self, batch: Batch, filled: Sample, wanted: FeedSpec) -> Program:
        """Return the program for updates like this one, and remember it.

        Args:
            filled: the sample after padding.
        """
        key = self._key(filled.batch, wanted)
        if key not in self.programs:
            self.engine.processes.set_status("compiling")
            length = self._length(filled.batch, wanted)
            self.programs[key] = self._plan(filled, wanted.short, length)
        self._filled[self._key(batch, wanted), batch.full] = self.programs[key]
        return self.programs[key]

    def _key(self, batch: Batch, wanted: FeedSpec) -> tuple:
        return *batch.program_key, batch.num_rows, wanted.short, wanted.most_of(batch) > 1

    def _length(self, batch: Batch, wanted: FeedSpec) -> int:
        """Return the most updates that a program for such batches runs."""
        most = most_in_a_dispatch(self.engine.devices, batch, wanted.most_of(batch))
        if most > 1 and not batch.is_resident and not self._may_loop(batch):
            return 1
        return max(1, min(most, MOST_UPDATES, _MOST_ROW_NUMBERS // batch.num_rows))

    def _may_loop(self, batch: Batch) -> bool:
        """Whether to compile a program of several updates for such loaded batches; it takes long.

        Where programs of one update exist too, only the first few kinds of batches get one: there
        may be hundreds.
        """
        kinds = self.findings.looped
        kind = f"{batch.signature} {batch.num_rows}"
        if self.engine.programs.loops_once or kind in kinds:
            return True
        if len(kinds) < _MOST_KINDS_LOOPED:
            kinds.append(kind)
        return kind in kinds

    def learn(self, state: State, batch: Batch) -> Update:
        """Trace the objective on such batches, before any other method sees such a batch."""
        key = batch.program_key
        if key not in self._updates:
            update = self._traced(self.update, state, batch)
            # unknown to the other updates
            if update.forward.variables is not self.update.forward.variables:
                self._use(update)
            self._updates[key] = update
        return self._updates[key]

    def _traced(self, update: Update, state: State, batch: Batch) -> Update:
        engine = self.engine
        cut = Cut(((1, batch.num_rows),), batch.num_rows, split=engine.replicas.is_split)
        data, rows, _ = self._staged(batch, cut)
        captured = engine.variables.captured(update.forward.inputs, state)
        return update.learned(cut, state._replace(captured=captured), data, rows)

    def _use(self, update: Update) -> None:
        """Use another update from now on."""
        for cache in (self._updates, self.programs, self._filled):
            cache.clear()
        self.update = update

    def _with_joined_losses(self) -> Update:
        forward = self.update.forward
        objective = joining(forward.objective)
        if objective is forward.objective or not isinstance(self.update, ObjectiveUpdate):
            return self.update
        return replace(self.update, forward=replace(forward, objective=objective))

    def _joined(self, sample: Sample) -> Sample:
        """Return the sample with losses of all rows together, if rows meet in the losses alone."""
        coupling = self.probe(sample)
        if not coupling.in_losses:
            return sample
        self.findings.coupling = replace(coupling, couples=False, joins=True, in_losses=False)
        self._use(self._with_joined_losses())
        return sample._replace(update=self.learn(sample.state, sample.batch))

    def padding_is_exact(self, sample: Sample) -> bool:
        """Whether rows of weight 0 change nothing, by probes, once; False if eager."""
        findings = self.findings
        if findings.pads is False or self.engine.programs.is_eager:
            return False
        if not self.probe(sample).padding_is_exact:
            return False
        if findings.pads is None:
            findings.pads = self._share(metrics_ignore_padding(self.engine, *sample.traced))
        return findings.pads

    def metrics_are_additive(self, sample: Sample) -> bool:
        """Whether the states of the metrics are sums over rows, by an experiment, once."""
        findings = self.findings
        if findings.adds is None:
            findings.adds = self._share(metrics_are_additive(self.engine, *sample.traced))
        return findings.adds

    def probe(self, sample: Sample) -> Coupling:
        """Return the coupling of the rows, probed once."""
        if self.findings.coupling is not None:
            return self.findings.coupling
        coupling = self._probe(sample)
        if sample.batch.num_rows > 1:  # one row shows nothing of others
            self.findings.coupling = coupling
        return coupling

    @property
    def limit(self) -> int:
        """The bytes that a program may use beside its arguments, the same in all processes."""
        if self.memory_limit is not None:
            return self.memory_limit
        self.findings.limit = self.findings.limit or self._share(self._measured())
        return self.findings.limit

    @property
    def room_for_data(self) -> int:
        """The bytes that arrays resident on the device may take, independent of `limit`."""
        self.findings.room = self.findings.room or self._share(self._measured() // 2)
        return self.findings.room

    @property
    def pads_short(self) -> bool | None:
        """Whether short batches are padded with rows of weight 0; None if it is not known yet."""
        pads = self.findings.pads
        coupling = self.findings.coupling
        if pads is False or (coupling is not None and not coupling.padding_is_exact):
            return False
        return None if coupling is None else pads

    def _measured(self) -> int:
        """The free bytes, less the quarter that an allocator may not give in one piece.

        Measured on an H100: a program that needs 89 % of the free memory failed.
        """
        free = self.engine.devices.memory()
        return _host_bytes() // 2 if free is None else free * 3 // 4

    def _share(self, found: Any) -> Any:
        """Return the finding of process 0: all processes must plan by the same measurements."""
        return self.engine.processes.broadcast(found, "sharing what was found out by trying")

    def _probe(self, sample: Sample) -> Coupling:
        coupling = self._probed(sample)
        joined = self._with_joined_losses()
        if not coupling.couples or coupling.moves or joined is self.update:
            return coupling
        traced = self._traced(joined, sample.state, sample.batch)
        of_outputs = self._probed(sample._replace(update=traced))
        return replace(coupling, in_losses=of_outputs.cut_is_exact)

    def _probed(self, sample: Sample) -> Coupling:
        return Coupling(**self._share(asdict(probe(self.engine, *sample.traced))))

    def _plan(self, sample: Sample, short: bool, length: int) -> Program:
        num_rows = sample.batch.num_rows
        size = num_rows if self.microbatch_size == "auto" else int(self.microbatch_size)
        if size < num_rows or self.engine.replicas.is_split:
            sample = self._joined(sample)
        whole = self._whole_cut(sample, short)
        if self.microbatch_size != "auto":
            return self._compile(self._cut(whole, size, sample), length, sample)
        program = self._compile(whole, length, sample)
        if program.memory is None and self.memory_limit is not None:
            warn(
                f"memory_limit has no effect: {keras.backend.backend()} does not report a "
                "program's memory."
            )
        size = whole.rows
        while program.memory is not None and program.memory > self.limit:
            if size == 1:
                warn(
                    f"Even one row at a time needs {program.memory} bytes, and may use "
                    f"{self.limit}: the update runs nevertheless. Raise memory_limit, or make the "
                    "model smaller."
                )
                return program
            sample = self._joined(sample)
            coupling = self.probe(sample)
            if not coupling.cut_is_exact:
                why = coupling.why(sample.update.forward.movers)
                warn(f"The batch is not cut to fit in {self.limit} bytes: {why}.")
                return program
            size = -(-size // 2)
            program = self._compile(self._cut(whole, size, sample), length, sample)
        return program

    def _whole_cut(self, sample: Sample, short: bool) -> Cut:
        """Return the cut into one microbatch; `short`: whether shorter batches may follow."""
        num_rows = sample.batch.num_rows
        split = self.engine.replicas.is_split
        padded = short and not sample.update.forward.facts.cannot_pad
        padded = padded and (self.findings.pads or self.padding_is_exact(sample))
        extra = self._shared_extra(sample) if split else "sum"
        size = num_rows
        if num_rows % self.engine.devices.num_replicas and self.padding_is_exact(sample):
            size = self._even(num_rows)
            padded = True
        return Cut(((1, size),), num_rows, padded=padded, extra=extra, split=split)

    def _cut(self, whole: Cut, size: int, sample: Sample) -> Cut:
        """Return the whole cut in microbatches of at most `size` rows, if it can be cut."""
        if size >= whole.rows:
            return whole
        coupling = self.probe(sample)
        if not coupling.cut_is_possible:
            warn(
                f"microbatch_size={size} has no effect: {coupling.why()}. Every update runs as a "
                "whole."
            )
            return whole
        num = -(-whole.rows // size)
        if self.padding_is_exact(sample):
            size = self._even(-(-whole.rows // num))
            padded = whole.padded or num * size != whole.rows
            split = self._may_split(whole, [size], sample)
            return Cut(((num, size),), whole.rows, padded=padded, split=split)
        if not coupling.cut_is_exact:
            effect = coupling.warning(sample.update.forward.movers)
            warn(f"microbatch_size={size} {effect} Leave microbatch_size out for whole batches.")
        small, larger = divmod(whole.rows, num)
        sections = [(num - larger, small)]
        if larger:
            sections.insert(0, (larger, small + 1))
        extra = whole.extra
        if coupling.extra == "mean" and not whole.split:
            extra = "mean"
        sizes = [size for _, size in sections]
        split = whole.split
        if coupling.cut_is_exact:
            split = self._may_split(whole, sizes, sample)
        return Cut(tuple(sections), whole.rows, extra=extra, split=split)

    def _may_split(self, whole: Cut, sizes: list[int], sample: Sample) -> bool:
        """Whether each replica may fold its rows of such microbatches, where any cut is exact."""
        num_replicas = self.engine.devices.num_replicas
        if whole.split or not self.engine.replicas.can_split:
            return whole.split
        are_even = all(size % num_replicas == 0 for size in sizes)
        return are_even and self.metrics_are_additive(sample)

    def _shared_extra(self, sample: Sample) -> str:
        """Return how other losses add up over replicas that see only their rows: "sum" or "mean".

        Raises:
            SpecificationError: a result depends on the rows of all replicas together.
        """
        coupling = self.probe(sample)
        if coupling.cut_is_possible and not coupling.cut_is_exact:
            with inference(self.engine.replicas.coupling_layers):
                coupling = self.findings.apart or self._probe(sample)
            if sample.batch.num_rows > 1:
                self.findings.apart = coupling
        why = "" if coupling.cut_is_exact else coupling.why()
        if not why and not self.metrics_are_additive(sample):
            why = "a metric's state is not a sum over rows"
        if why:
            must = (
                "Under tf.distribute every replica sees its own rows alone, and the results "
                "must add up."
            )
            attempt = "the JAX engine, where replicas share one array of all rows."
            raise SpecificationError(message(must, why, attempt))
        return "mean" if coupling.extra == "mean" else "sum"

    def _even(self, size: int) -> int:
        """Return the next size that the replicas can share equally."""
        num = self.engine.devices.num_replicas
        return -(-size // num) * num

    def _staged(self, batch: Batch, cut: Cut) -> tuple[Any, Tensor, Tensor]:
        """Return the data, row numbers and number of rows of one update, on the device."""
        devices = self.engine.devices
        data, rows = stage(devices, batch, cut)
        rows, count = devices.place((rows, np.array(cut.rows, np.int32)))
        return data, rows, count

    def _compile(self, cut: Cut, length: int, sample: Sample) -> Program:
        engine = self.engine
        update, state, batch = sample
        data, rows, count = self._staged(batch, cut)
        captured = engine.variables.captured(update.forward.inputs, state)
        sums = engine.devices.place(update.epoch_sums.empty())
        state = state._replace(captured=captured, sums=sums)
        row_plan, reasons = update.row_planner.plan(cut, state, data, rows)
        if row_plan.tables:  # they need the lookups of all replicas
            cut = replace(cut, split=False)
        state = state._replace(captured=())
        whole_update = update.whole_update(cut, row_plan)
        is_slow = engine.programs.loops_slowly(whole_update, state, captured, data, rows, count)
        most = 1 if is_slow else length
        if batch.is_resident:
            num_stacked = 1
        else:
            num_stacked = length = most
        if num_stacked > 1:
            data = engine.devices.stage(stack([batch], num_stacked))
        loops = not is_slow and (most > 1 or engine.programs.loops_once)
        arguments = engine.variables.between_programs(state), captured, data
        updates = update.program(whole_update, most, self.empty or [], loops=loops)
        repeats = loops and (update.suits_xla or engine.programs.always_xla)
        table = length, cut.places
        made = compiled(engine, updates, arguments, table, repeats=repeats)
        made = made._replace(memory=self._share(made.memory))
        notes = describe(row_plan, reasons, cut.num_microbatches)
        return Program(*made, cut, length, most, num_stacked, notes, update)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
