"""Search for the errors that turn the meant gradient into the observed one, the cheap ones first."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np

from stepcheck.errors import attempt
from stepcheck.faults import Fault
from stepcheck.solve.basis import MOST_ROWS, NUM_SOLVED, Basis, labels_of_others
from stepcheck.solve.changes import by_variable, in_sums
from stepcheck.solve.coefficients import RAW, SPARE, Made, Said, Vectors, solve
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.forms import BASE, Form, forms, mixtures
from stepcheck.solve.outputs import Output, differing_outputs
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import SOLVED
from stepcheck.trace.windows import PAD
from stepcheck.values import Change, Count, Detail, Known, Level, Part, Setting, Unit

_NAMED, _NAMED_TOO = 0.75, 0.25  # the cost that a name in the field saves
_MOST_PAIRED = 64  # rows of an update, for whose pairs of outputs and labels factors are tried
_SURE = 0.5  # the cost of one error with a name, beside which no other is looked for
_STEPS = 1, 2  # updates or batches by which a gradient may be old


@dataclass(frozen=True)
class Explanation:
    """Changes that make the gradients; `made`: by update, None where the update before is not known.

    `rests`: the gradient without each change, in their order; empty if they depend on each other.
    """

    changes: tuple[Change, ...]
    cost: float
    apart: float
    made: Sequence[np.ndarray | None]
    rests: Sequence[Sequence[np.ndarray | None]] = ()


class Search:
    """A search on some updates, up to a time; `found` lists the explanations that reproduce their gradients."""

    def __init__(self, meant: Meant, chosen: Sequence[Evidence], until: float):
        self._until = until
        self.meant, self.fits = meant, meant.replay.tolerance.fits
        most = max(len(piece.rows) for e in chosen for piece in e.update.pieces)
        self.bases = [Basis(e, most) for e in chosen]
        self._of_weights = [Basis(e.of, most) for e in chosen]  # whose norms are clipped
        self.has_penalty = any(basis.has_penalty for basis in self.bases)
        self.found: list[Explanation] = []
        self._is_small = len(chosen[0].handed) <= NUM_SOLVED
        self._num_rows = max(sum(basis.sizes) for basis in self.bases)
        self._forms: list[Form] = []

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._until

    def stages(self) -> Iterator[tuple[Callable[[], None], float]]:
        """Yield (an attempt, the cost up to which an explanation found by then is enough)."""
        yield self._simple, 1.6
        yield self._of_forms, 1.6
        yield self._by_variable, 1.6
        yield partial(self._shapes, BASE), 2.1
        yield self._by_row, 2.6
        yield self._assigned, RAW + 1
        yield self._of_forms_by_piece, 4.0
        yield self._of_two_forms, 5.0

    def _simple(self) -> None:
        self._whole(BASE)
        self._stale()
        self._by_term()
        self._by_piece(BASE)
        for said in in_sums(self._of_weights):
            self._add(said, self._of_weights)
        self._by_output()

    def _by_output(self) -> None:
        """Search in the losses of several outputs, each by its own derivative."""
        outputs = differing_outputs(self.meant, [basis.e for basis in self.bases])
        explained = [(one, self._of_output(one)) for one in outputs]
        if not explained or any(best is None for _, best in explained):
            return
        found = [(one, best) for one, best in explained if best is not None]
        changes = [
            replace(change, setting=setting_of(change, one.evidence), outputs=(one.name,))
            for one, best in found
            for change in best.changes
        ]
        names = tuple(one.name for one in outputs)
        shared = {replace(change, outputs=names) for change in changes}
        is_one = len(found) > 1 == len(shared)
        pairs = zip(self.bases, zip(*(best.made for _, best in found), strict=True), strict=True)
        num_more = len(found) - 1  # each has the loop's others
        made: Made = [sum(each) - num_more * basis.e.handed for basis, each in pairs]
        rests: list[Made] = (
            []
            if is_one or len(changes) == 1
            else [o.without_error for o, b in found for _ in b.changes]
        )
        cost = max(best.cost for _, best in found)
        self._add(Said([*shared] if is_one else changes, cost, made, rests))

    def _of_output(self, output: Output) -> Explanation | None:
        search = Search(output.meant, output.evidence, self._until)
        for search_more, enough in search.stages():
            search_more()
            if any(each.cost <= enough for each in search.found) or search.is_over:
                break
        best = min(search.found, key=lambda each: each.cost, default=None)
        return best if best is not None and best.cost < RAW else None

    def _of_forms(self) -> None:
        evidence = [basis.e for basis in self.bases]
        for form in forms(self.meant, evidence):
            if self._is_possible(form) and self._is_other(form) and self._can_try(form):
                self._forms.append(form)
            if not self._is_small:
                for basis in self.bases:
                    basis.forget()
            if any(each.cost <= _SURE for each in self.found) or self.is_over:
                return
        for mixture in mixtures(self.meant, evidence):
            if all(map(self._is_possible, mixture.forms)):
                columns = [[basis.whole(form) for form in mixture.forms] for basis in self.bases]
                self._mixed(columns, mixture.change)

    def _of_forms_by_piece(self) -> None:
        for form in self._forms:
            is_short = (
                self._is_small and not self.is_over
            )  # else each takes many long backward passes
            is_short &= not form.is_of_pairs or self._num_rows <= _MOST_PAIRED
            if form.changes[0].fault.has_name and is_short:
                self._by_piece(form)
                self._shapes(form)

    def _of_two_forms(self) -> None:
        for one, two in combinations(self._forms * self._is_small, 2):
            is_whole = one.is_of_pairs or two.is_of_pairs
            is_whole |= one.objective is not None and two.objective is not None
            quantities = {form.changes[0].fault.quantity for form in (one, two)}
            are_apart = len(quantities) > 1 and not is_whole
            if are_apart and not self.is_over:
                self._can_try(one.with_(two))

    def _is_possible(self, form: Form) -> bool:
        whole, _ = attempt(
            lambda: self.bases[0].whole(form)
        )  # an error: of labels that are none for a loss
        return whole is not None and bool(np.all(np.isfinite(whole)))

    def _can_try(self, form: Form) -> bool:
        """Try a form; return False where a loss refuses the outputs of a later update, as PyTorch's do."""
        _, error = attempt(lambda: self._whole(form))
        return error is None

    def _is_other(self, form: Form) -> bool:
        pairs = ((basis.whole(form), basis.whole()) for basis in self.bases)
        return any(
            np.linalg.norm(made - meant) > self.fits * np.linalg.norm(meant)
            for made, meant in pairs
        )

    def _whole(self, form: Form) -> None:
        self._solve(Vectors(Level.UPDATE, form, lambda basis: [basis.whole(form)], _first))

    def _by_piece(self, form: Form) -> None:
        if any(len(basis.sizes) > 1 for basis in self.bases):
            vectors = lambda basis: basis.used(form), lambda basis: basis.at(form)
            self._solve(Vectors(Level.MICROBATCH, form, *vectors))

    def _by_row(self) -> None:
        most = max(sum(basis.sizes) for basis in self.bases)
        if most > MOST_ROWS or any(most + SPARE + 2 > len(basis.e.handed) for basis in self.bases):
            return
        self._solve(Vectors(Level.ROW, BASE, Basis.rows, lambda basis: np.arange(sum(basis.sizes))))

    def _shapes(self, form: Form) -> None:
        """Try factors of the rows that are proportional to a count, or that only some rows have."""
        for shape in self.bases[0].shapes:
            factors = [basis.shapes[shape] for basis in self.bases]
            has_levels = any(map(np.ptp, factors)) or shape.uses(Known.NUMBER_OF_BATCH)
            is_of_some = shape.rows is not None and np.ptp(np.concatenate(factors))
            if (has_levels or is_of_some) and not self.is_over:

                def of_rows(basis: Basis, shape: Count = shape) -> np.ndarray:
                    return basis.shapes[shape]

                def columns(basis: Basis, shape: Count = shape) -> list[np.ndarray]:
                    return [basis.shaped(form, basis.shapes[shape])]

                self._solve(Vectors(Level.SHAPE, form, columns, _first, shape, of_rows))

    def _stale(self) -> None:
        """Try the gradient of an update before, of all its rows or of its last batch."""
        ways: dict[Detail, Callable[[Evidence], np.ndarray]] = {
            Detail.UPDATES_BEFORE: lambda e: e.reference,
            Detail.BATCHES_BEFORE: _of_last_batch,
        }
        for steps in _STEPS:
            before = [_back(basis, steps) for basis in self.bases]
            if sum(e is not None for e in before) < 2:
                continue
            for detail, way in ways.items():
                change = Change(Fault.STALE_GRADIENTS, detail, (steps,))
                self._add(Said([change], 1.0, [None if e is None else way(e) for e in before], []))

    def _by_term(self) -> None:
        """Try a number for the loss of each output, the same in all updates."""
        first = self.bases[0].e.terms[0]
        used: list[int] = np.flatnonzero(first.coefficients).tolist()
        meant, num = first.coefficients[used], len(used)
        if num < 2:
            return

        def change(numbers: np.ndarray) -> Change | None:
            counted = numbers * meant
            for number in (np.zeros(num), np.ones(num), meant):
                is_near = np.abs(counted - number) <= SOLVED * np.abs(counted).max()
                counted = np.where(is_near, number, counted)
            numbers[:] = counted / meant
            if np.array_equal(counted, meant) or not np.any(counted):
                return None
            is_even = np.array_equal(counted, np.ones(num))
            fault = Fault.LOSS_WEIGHTS_IGNORED if is_even else Fault.OTHER_LOSS_WEIGHTS
            fault = Fault.OUTPUT_LEFT_OUT if np.any(counted == 0) else fault
            names = tuple(first.names[i] for i in used)
            return Change(fault, Detail.TERMS_COUNT, (*counted.tolist(), *meant.tolist()), names)

        self._mixed([[basis.of_term(i) for i in used] for basis in self.bases], change)

    def _mixed(
        self, columns: list[list[np.ndarray]], change: Callable[[np.ndarray], Change | None]
    ) -> None:
        """Try numbers that are the same in all updates: solved for in one half, to hold in both."""
        half = list(zip(columns, self.bases, strict=True))[: (len(columns) + 1) // 2]
        solved = [least(own, basis.e.handed - basis.e.penalty)[0] for own, basis in half]
        numbers = np.median(solved, axis=0)
        if np.all(np.isfinite(numbers)) and (found := change(numbers)) is not None:
            pairs = zip(columns, self.bases, strict=True)
            made = [numbers @ np.stack(own) + basis.e.penalty for own, basis in pairs]
            is_plain = found.fault.has_name and found.fault is not Fault.OTHER_LOSS_WEIGHTS
            self._add(Said([found], 1.0 if is_plain else 0.5 * len(numbers), [*made], []))

    def _assigned(self) -> None:
        rows: dict[int, np.ndarray] = {}
        for basis in self.bases:
            if (found := labels_of_others(basis.e)) is None:
                return
            rows |= zip((piece.called.order for piece in basis.e.update.pieces), found, strict=True)
        change = Change(Fault.LABELS_OF_OTHER_ROWS, Detail.OF_OTHER_ROWS)
        self._whole(Form((change,), rows=lambda e, piece: rows[piece.called.order]))

    def _solve(self, vectors: Vectors) -> None:
        for said in solve(vectors, self.bases, self.fits):
            self._add(said)

    def _add(self, said: Said, bases: list[Basis] | None = None) -> None:
        pairs = zip(bases or self.bases, said.made, strict=True)
        changes = tuple(said.changes)
        proven = (
            [own if own is None else basis.e.proven(own) for basis, own in pairs] if changes else []
        )
        apart = max((each[1] for each in proven if each is not None), default=np.inf)
        if apart <= self.fits:
            num_named = sum(change.fault.has_name for change in changes)
            saved = _NAMED * min(num_named, 1) + _NAMED_TOO * max(num_named - 1, 0)
            made = [None if each is None else each[0] for each in proven]
            self.found.append(Explanation(changes, said.cost - saved, apart, made, said.rests))

    def _by_variable(self) -> None:
        for is_bare in (False, True) if self.has_penalty else (False,):
            if (said := by_variable(self.bases, self.fits, is_bare=is_bare)) is not None:
                self._add(said)


def _first(basis: Basis) -> np.ndarray:
    return basis.starts[:1]


def _back(basis: Basis, steps: int) -> Evidence | None:
    """Return the evidence of the update `steps` before, if its gradient has the same parameters."""
    e: Evidence | None = basis.e
    for _ in range(steps):
        e = None if e is None else e.before
    return e if e is not None and len(e.handed) == len(basis.e.handed) else None


def _of_last_batch(e: Evidence) -> np.ndarray:
    return e.parts[-1] * (e.whole[0] / e.weights[-1][0].sum()) + e.penalty


def setting_of(change: Change, evidence: Sequence[Evidence]) -> Setting:
    """Return the updates that a change was seen in, by which it is put into words."""
    every = [(p, w) for e in evidence for p, w in zip(e.update.pieces, e.weights, strict=True)]
    are_ones = all(np.all(weights[:, piece.rows != PAD] == 1) for piece, weights in every)
    meant, sizes = evidence[0].meant, {sum(e.update.sizes) - sum(e.pads) for e in evidence}
    unit = Unit.WEIGHTS if meant.replay.data[2] is None else Unit.SAMPLE_WEIGHTS
    num_rows = sizes.pop() if are_ones and len(sizes) == 1 else 0
    is_of_lanes = change.count is not None and change.count.uses(Known.WEIGHT_OF_REPLICA)
    nums = [
        (e.num_replicas, e.num_replicas if is_of_lanes else len(e.update.pieces)) for e in evidence
    ]
    part = Part.REPLICA if all(1 < num == pieces for num, pieces in nums) else Part.MICROBATCH
    if getattr(meant.optimizer, "gradient_accumulation_steps", None):
        part = Part.CALL
    return Setting(part, Unit.ROWS if are_ones else unit, num_rows)
