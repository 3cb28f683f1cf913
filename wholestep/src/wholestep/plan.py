"""The plan of an update: microbatches, padding, updates per dispatch. It changes only rounding,
unless it warns.
"""

import math
import os
from collections.abc import Iterable
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
    layers,
    metrics_are_additive,
    metrics_ignore_padding,
    probe,
)
from wholestep.program import MOST_UPDATES, Program, ProgramCache, Wanted, compiled
from wholestep.state import State
from wholestep.update import Update

_MOST_ROW_NUMBERS = 1 << 20
_MOST_KINDS_LOOPED = 4


class Sample(NamedTuple):
    """A batch by which an update is planned, the update traced for such batches, and the state
    before it.
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
        empty: the metrics' values before the first row, known once an epoch has begun.
        programs: the programs by the shape of an update.
    """

    engine: Engine
    update: Update
    microbatch_size: int | str
    memory_limit: int | None
    findings: Findings
    empty: list[np.ndarray] = field(default_factory=list)
    programs: ProgramCache = field(default_factory=ProgramCache)
    _updates: ProgramCache = field(default_factory=ProgramCache)
    # the same by the shape of a batch before it is padded
    _filled: ProgramCache = field(default_factory=ProgramCache)

    def adopt(self, findings: Findings) -> None:
        """Plan by the findings of a restored run; drop the programs planned by different
        findings.
        """
        if not findings.plans_as(self.findings):
            self.programs.clear()
            self._filled.clear()
        self.findings = findings

    def note_no_xla(self) -> None:
        """Note why programs are not compiled by XLA, as the engine has found."""
        self.findings.why_no_xla = self.engine.programs.why_no_xla

    def wanted(self, batches: Batches | None) -> Wanted:
        """Return the common properties of all updates on these batches; None for single batches."""
        num_shapes = len(batches.shapes) if batches is not None else 0
        many_are_alike = num_shapes < 2 and batches is not None
        if batches is not None and batches.arrays is not None and not num_shapes:
            most = len(batches)
        else:
            most = MOST_UPDATES if self.engine.programs.loops_once or many_are_alike else 1
        return Wanted(batches is None or batches.has_short_batch, most, num_shapes)

    def known(self, batch: Batch, wanted: Wanted) -> Program | None:
        """Return the known program for updates like this one; None if there is none."""
        return self._filled.get((self._key(batch, wanted), batch.full))

    def filled(self, sample: Sample, wanted: Wanted) -> Sample:
        """Return the sample, padded to the rows of a full batch if it is short and padding is
        exact.
        """
        batch = sample.batch
        is_short = batch.num_rows < batch.full
        may_fill = (is_short or wanted.num_shapes > 0) and self.padding_is_exact(sample)
        return sample._replace(batch=batch.padded(batch.full)) if is_short and may_fill else sample

    def is_new(self, filled: Batch, wanted: Wanted) -> bool:
        """Whether no program for such updates has been compiled."""
        return self._key(filled, wanted) not in self.programs

    def program(self, batch: Batch, filled: Sample, wanted: Wanted) -> Program:
        """Return the program for updates like this one, and remember it; `filled` is the sample
        after padding.
        """
        key = self._key(filled.batch, wanted)
        if key not in self.programs:
            self.engine.processes.set_status("compiling")
            self.programs[key] = self._plan(
                filled, wanted.short, self._length(filled.batch, wanted)
            )
        self._filled[self._key(batch, wanted), batch.full] = self.programs[key]
        return self.programs[key]

    def _key(self, batch: Batch, wanted: Wanted) -> tuple:
        return *batch.program_key, batch.num_rows, wanted.short, wanted.most > 1

    def _length(self, batch: Batch, wanted: Wanted) -> int:
        """Return the most updates that a program for such batches runs."""
        most = most_in_a_dispatch(self.engine.devices, batch, wanted.most)
        if most > 1 and not batch.is_resident and not self._may_loop(batch):
            return 1
        return max(1, min(most, MOST_UPDATES, _MOST_ROW_NUMBERS // batch.num_rows))

    def _may_loop(self, batch: Batch) -> bool:
        """Whether to compile a program of several updates for loaded batches like this one, which
        takes long.

        Where programs of one update exist too, only the first few kinds of batches get one: there
        may be hundreds.
        """
        kinds = self.findings.looped
        kind = f"{batch.signature} {batch.num_rows}"
        if (
            not self.engine.programs.loops_once
            and kind not in kinds
            and len(kinds) < _MOST_KINDS_LOOPED
        ):
            kinds.append(kind)
        return self.engine.programs.loops_once or kind in kinds

    def learn(self, state: State, batch: Batch) -> Update:
        """Trace the objective on batches like this one, before any other method sees such a
        batch.
        """
        if batch.program_key not in self._updates:
            cut = Cut(((1, batch.num_rows),), batch.num_rows, split=self.engine.replicas.is_split)
            data, rows = stage(self.engine.devices, batch, cut)
            rows, count = self.engine.devices.place((rows, np.array(batch.num_rows, np.int32)))
            state = state._replace(
                captured=self.engine.variables.captured(self.update.forward.inputs, state)
            )
            update = self.update.learned(cut, state, data, rows, count)
            # unknown to the other updates
            if update.forward.variables is not self.update.forward.variables:
                for known in (self._updates, self.programs, self._filled):
                    known.clear()
                self.update = update
            self._updates[batch.program_key] = update
        return self._updates[batch.program_key]

    def padding_is_exact(self, sample: Sample) -> bool:
        """Whether rows of weight 0 change nothing. Probes the objective and the metrics, once;
        False if eager.
        """
        found = self.findings
        if (
            found.pads is False
            or self.engine.programs.is_eager
            or not self.probe(sample).padding_is_exact
        ):
            return False
        if found.pads is None:
            found.pads = self._share(metrics_ignore_padding(self.engine, *sample.traced))
        return found.pads

    def metrics_are_additive(self, sample: Sample) -> bool:
        """Whether the states of the metrics are sums over rows, by an experiment, once."""
        found = self.findings
        if found.adds is None:
            found.adds = self._share(metrics_are_additive(self.engine, *sample.traced))
        return found.adds

    def probe(self, sample: Sample) -> Coupling:
        """Return the coupling of the rows, probed once."""
        if self.findings.coupling is not None:
            return self.findings.coupling
        found = self._probe(sample)
        # one row shows nothing of others
        self.findings.coupling = found if sample.batch.num_rows > 1 else None
        return found

    @property
    def limit(self) -> int:
        """The bytes that a program may use in addition to its arguments, the same in all
        processes.
        """
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
        """The bytes that are free on the device, less the quarter that an allocator may not give in
        one piece.

        Measured on an H100: a program that needs 89 % of the free memory failed.
        """
        free = self.engine.devices.memory()
        return _host_bytes() // 2 if free is None else free * 3 // 4

    def _share(self, found: Any) -> Any:
        """Return the finding of process 0: all processes must plan by the same measurements."""
        return self.engine.processes.broadcast(found, "sharing what was found out by trying")

    def _probe(self, sample: Sample) -> Coupling:
        return Coupling(**self._share(asdict(probe(self.engine, *sample.traced))))

    def _plan(self, sample: Sample, short: bool, length: int) -> Program:
        num_rows = sample.batch.num_rows
        split = self.engine.replicas.is_split
        padded = short and not sample.update.forward.facts.cannot_pad
        padded = padded and (self.findings.pads or self.padding_is_exact(sample))
        whole = Cut(((1, num_rows),), num_rows, padded=padded, split=split)
        if split:
            whole = replace(whole, extra=self._shared_extra(sample))
        if num_rows % self.engine.devices.num_replicas and self.padding_is_exact(sample):
            whole = replace(whole, sections=((1, self._even(num_rows)),), padded=True)
        if self.microbatch_size != "auto":
            cut = self._cut(whole, int(self.microbatch_size), sample)
            return self._compile(cut, length, sample)
        program = self._compile(whole, length, sample)
        if program.memory is None and self.memory_limit is not None:
            warn(
                f"memory_limit has no effect: {keras.backend.backend()} does not report a "
                "program's memory."
            )
        size = num_rows
        while program.memory is not None and program.memory > self.limit and size > 1:
            if not self.probe(sample).cut_is_exact:
                why = self.probe(sample).why(sample.update.forward.movers)
                warn(f"The batch is not cut to fit in {self.limit} bytes: {why}.")
                return program
            size = -(-size // 2)
            program = self._compile(self._cut(whole, size, sample), length, sample)
        if program.memory is not None and program.memory > self.limit:
            warn(
                f"Even one row at a time needs {program.memory} bytes, and may use {self.limit}: "
                "the update runs "
                "nevertheless. Raise memory_limit, or make the model smaller."
            )
        return program

    def _cut(self, whole: Cut, size: int, sample: Sample) -> Cut:
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
            split = self._may_split(whole, [size], sample)
            return Cut(
                ((num, size),),
                whole.rows,
                padded=whole.padded or num * size != whole.rows,
                split=split,
            )
        if not coupling.cut_is_exact:
            effect = coupling.warning(sample.update.forward.movers)
            warn(f"microbatch_size={size} {effect} Leave microbatch_size out for whole batches.")
        small, larger = divmod(whole.rows, num)
        sections = tuple(s for s in ((larger, small + 1), (num - larger, small)) if s[0])
        extra = whole.extra if whole.split else "mean" if coupling.extra == "mean" else "sum"
        split = coupling.cut_is_exact and self._may_split(
            whole, [size for _, size in sections], sample
        )
        return Cut(sections, whole.rows, extra=extra, split=whole.split or split)

    def _may_split(self, whole: Cut, sizes: list[int], sample: Sample) -> bool:
        """Whether each replica may fold its rows of microbatches of such sizes, where any cut is
        exact.
        """
        num = self.engine.devices.num_replicas
        if whole.split or not self.engine.replicas.can_split or any(size % num for size in sizes):
            return whole.split
        return self.metrics_are_additive(sample)

    def _shared_extra(self, sample: Sample) -> str:
        """Return how other losses add up over replicas that see only their rows: "sum" or "mean".

        Raises:
            SpecificationError: a result depends on the rows of all replicas together.
        """
        coupling = self.probe(sample)
        if coupling.cut_is_possible and not coupling.cut_is_exact:
            with inference(self.engine.replicas.coupling_layers):
                coupling = self.findings.apart or self._probe(sample)
            self.findings.apart = coupling if sample.batch.num_rows > 1 else self.findings.apart
        why = "" if coupling.cut_is_exact else coupling.why()
        if not why and not self.metrics_are_additive(sample):
            why = "a metric's state is not a sum over rows"
        if why:
            must = (
                "Under tf.distribute every replica sees its own rows alone, and the results "
                "must add up."
            )
            raise SpecificationError(
                message(must, why, "the JAX engine, where replicas share one array of all rows.")
            )
        return "mean" if coupling.extra == "mean" else "sum"

    def _even(self, size: int) -> int:
        """Return the next size that the replicas can share equally."""
        num = self.engine.devices.num_replicas
        return -(-size // num) * num

    def _compile(self, cut: Cut, length: int, sample: Sample) -> Program:
        engine, (maker, state, batch) = self.engine, sample
        data, rows = stage(engine.devices, batch, cut)
        places, count = engine.devices.place((rows, np.array(cut.rows, np.int32)))
        values = engine.variables.captured(maker.forward.inputs, state)
        state = state._replace(captured=values, sums=engine.devices.place(maker.epoch_sums.empty()))
        row_plan, wholes = maker.row_planner.plan(cut, state, data, places)
        # tables need the lookups of all replicas
        cut = replace(cut, split=False) if row_plan.tables else cut
        update = maker.whole_update(cut, row_plan)
        state = state._replace(captured=())
        slowly = engine.programs.loops_slowly(update, state, values, data, places, count)
        most = 1 if slowly else length
        loops = not slowly and (length > 1 or engine.programs.loops_once)
        length, num_stacked = (length, 1) if batch.is_resident else (most, most)
        if num_stacked > 1:
            data = engine.devices.stage(stack([batch], num_stacked))
        program = maker.program(update, most, self.empty, loops=loops)
        rest = engine.variables.between_programs(state)
        compiles = loops and (maker.suits_xla or engine.programs.always_xla)
        made = compiled(
            engine, program, (rest, values, data), (length, cut.places), repeats=compiles
        )
        made = made._replace(memory=self._share(made.memory))
        notes = describe(row_plan, wholes, cut.num_microbatches)
        return Program(*made, cut, length, most, num_stacked, notes, maker)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_UNSEEN = (
    "behind Keras' back, as tf.random, jax.random and numpy do, or in a tf.function of its own"
)


def explain(planner: Planner, sharded: list[str], data: str) -> str:
    """Return a description of how an update runs.

    Args:
        sharded: the sharded variables.
        data: the place of the data, as text.
    """
    engine = planner.engine
    coupling = planner.findings.coupling
    newest_first = [*planner.programs.values()][::-1]
    program = max(newest_first, key=lambda each: each.cut.rows)
    several = len(newest_first)
    cut = program.cut
    lines = [
        *(
            [f"{several} programs for updates of several shapes; that of the most rows:"]
            if several > 1
            else []
        ),
        f"One update takes {cut}.",
        *_spread(cut, engine),
        _padding(cut, planner.pads_short),
        *([data] if data else []),
        (
            f"Up to {program.most} updates go to the device in one dispatch "
            f"({keras.backend.backend()})."
        )
        if program.most > 1
        else f"Each update is a separate dispatch ({keras.backend.backend()}).",
    ]
    lines += [program.how] if program.how else []
    lines += _trained(program.forward)
    if sharded:
        lines.append(f"Sharded, never gathered for the update: {', '.join(sharded)}.")
    if program.memory is not None:
        needs = program.memory / 2**20
        limit = planner.limit / 2**20
        lines.append(
            f"Besides data and weights, the program needs {needs:.1f} MiB, of {limit:.0f} it may "
            "use."
        )
    lines += program.table_notes
    drawn = _drawn(coupling, program.forward)
    if coupling is not None and not (coupling.cut_is_exact and drawn):
        is_cut = any(each.cut.num_microbatches > 1 for each in planner.programs.values())
        lines.append(coupling.explanation(program.forward.movers, is_cut=is_cut))
    if coupling is not None and coupling.custom:
        lines.append(
            "The model's step is run unchanged: without microbatches, replicas or padding, whose "
            "exactness cannot be "
            "guaranteed for it. Its losses and the weights are checked afterwards."
        )
    form_of_gradients = program.function.form_of_gradients()
    return "\n".join([*lines, *drawn, *([form_of_gradients] if form_of_gradients else [])])


def _trained(forward: Forward) -> list[str]:
    """Return a line about the weights that train, if others are frozen; statistics do not count."""
    trained = forward.variables.params
    could_train = dict[int, keras.Variable]()
    for layer in layers(forward.model):
        could_train |= {id(v): v for v in layer._trainable_variables}
    if len(trained) >= len(could_train):
        return []
    weights = f"{_num_weights(trained):,} of {_num_weights(could_train.values()):,} weights"
    return [f"Trains {weights}, in {len(trained)} of {len(could_train)} variables."]


def _num_weights(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _drawn(coupling: Coupling | None, forward: Forward) -> list[str]:
    """Return a line about random draws that do not belong to rows, if there are any."""
    facts = forward.facts.draws
    unknown = [f"keras.random.{fact.name} ({fact.why})" for fact in facts if fact.why]
    if unknown:
        return [f"Random draws differ between cuts: {'; '.join(dict.fromkeys(unknown))}."]
    if coupling is None or not coupling.draws:
        return []
    reasons = {
        "an axis that is a multiple of the rows does not hold them outermost": any(
            f.axis is not None for f in facts
        ),
        "rows take parts of a draw whose shape does not grow with them": any(
            f.axis is None for f in facts
        ),
        f"something draws {_UNSEEN}": True,
    }
    why = ", or ".join(reason for reason, may_be in reasons.items() if may_be)
    return [f"Random draws differ between cuts: {why}."]


def _spread(cut: Cut, engine: Engine) -> list[str]:
    """Return lines about the spread of rows over hosts and replicas, if there are several."""
    replicas = engine.devices.num_replicas
    hosts = engine.processes.count
    if replicas == 1:
        return []
    counts = [
        ("" if num == 1 else f"{num} microbatches x ", -(-size // replicas))
        for num, size in cut.sections
    ]
    shares = " + ".join(f"{several}{size} rows" for several, size in counts)
    shares = f"({shares})" if len(counts) > 1 else shares
    many = f"{hosts} {'host' if hosts == 1 else 'hosts'} x {replicas / hosts:g} replicas"
    is_even = all(size % replicas == 0 for _, size in cut.sections)
    layout = f"= {many} x {shares}" if is_even else f"on {many}, at most {shares} on each"
    lines = [f"{cut.places} places {layout}."]
    if cut.split:
        return [
            *lines,
            "Each replica sums over its own rows; the sums of all go over the wire once an update.",
        ]
    return [*lines, "Arrays are global: every replica sees the statistics of all rows."]


def _padding(cut: Cut, pads_short: bool | None) -> str:
    extra = cut.places - cut.rows
    places = "place is" if extra == 1 else f"{extra} places are"
    lines = [f"The last {places} padding of weight 0."] if extra else []
    if not cut.padded:
        return "".join(lines) or "No row is padding."
    shorter = {
        True: "Shorter batches are filled up with rows of weight 0.",
        False: "Shorter batches run in their own shape, as padding would count.",
        None: "Whether shorter batches can be filled up with rows of weight 0 is tried when one "
        "comes.",
    }
    return " ".join([*lines, shorter[pads_short]])
