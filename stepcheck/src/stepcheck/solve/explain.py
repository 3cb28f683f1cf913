"""Search for the errors that turn the meant gradient into the observed one, the cheap ones first."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np

from stepcheck.report.found import many
from stepcheck.solve.basis import MOST_ROWS, NUM_SOLVED, Basis, labels_of_others
from stepcheck.solve.changes import by_variable, in_sums
from stepcheck.solve.coefficients import RAW, SPARE, Level, solve
from stepcheck.solve.evidence import Evidence, Meant
from stepcheck.solve.forms import BASE, Error, Form, forms, mixtures
from stepcheck.solve.outputs import Output, differing_outputs, named
from stepcheck.solve.ratios import least
from stepcheck.trace.measure import SOLVED
from stepcheck.trace.windows import PAD

_NAMED, _NAMED_TOO = 0.75, 0.25  # the cost that a name in the field saves
_OTHER = "other loss weights"
_MOST_PAIRED = 64  # rows of an update, for whose pairs of outputs and labels factors are tried
_SURE = 0.5  # the cost of one error with a name, beside which no other is looked for
_COUNTED = {  # counts of a basis, in the words of a report
    "the weight of the own": "{} of its",
    "the weight of": "{} of",
    "the rows of the own": "the number of rows of its",
    "its rows with those that fill up": "the number of rows with those that fill up",
    "its rows": "the number of rows of the update",
    "the rows with a weight": "the number of rows with a weight",
    "its places": "the number of places of the update",
}


@dataclass(frozen=True)
class Explanation:
    """Errors that make the gradients; `made`: by update, None where the update before is not known.

    `rests`: the gradient without each error, in the order of `errors`; empty if errors depend on each other.
    """

    errors: tuple[Error, ...]
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
        self._of_weights = [Basis(getattr(e, "of", e), most) for e in chosen]  # whose norms are clipped
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
        for errors, cost, made in in_sums(self._of_weights):
            self._add(errors, cost, made, self._of_weights)
        self._by_output()

    def _by_output(self) -> None:
        """Search in the losses of several outputs, each by its own derivative."""
        outputs = differing_outputs(self.meant, [basis.e for basis in self.bases])
        explained = [(one, self._of_output(one)) for one in outputs]
        if not explained or any(best is None for _, best in explained):
            return
        found = [(one, best) for one, best in explained if best is not None]
        errors = [named(in_words(e, one.evidence), one.name) for one, best in found for e in best.errors]
        if len(found) > 1 == len({(error.predicate, error.number) for error in errors}):  # the same in each
            errors = [named(found[0][1].errors[0], *(one.name for one, _ in found))]
        pairs = zip(self.bases, zip(*(best.made for _, best in found), strict=True), strict=True)
        made = [sum(each) - (len(each) - 1) * basis.e.handed for basis, each in pairs]  # each has the loop's others
        rests = [one.without_error for one, best in found for _ in best.errors] if len(errors) > 1 else []
        self._add(errors, max(best.cost for _, best in found), made, rests=rests)

    def _of_output(self, output: Output) -> Explanation | None:
        search = Search(output.meant, output.evidence, self._until)
        for attempt, enough in search.stages():
            attempt()
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
                self._mixed([[basis.whole(form) for form in mixture.forms] for basis in self.bases], mixture.told)

    def _of_forms_by_piece(self) -> None:
        for form in self._forms:
            is_short = self._is_small and not self.is_over  # else each takes many long backward passes
            is_short &= not form.is_of_pairs or self._num_rows <= _MOST_PAIRED
            if form.errors[0].causes and is_short:
                self._by_piece(form)
                self._shapes(form)

    def _of_two_forms(self) -> None:
        for one, two in combinations(self._forms * self._is_small, 2):
            is_whole = one.is_of_pairs or two.is_of_pairs or (one.objective is not None and two.objective is not None)
            are_apart = one.errors[0].quantity != two.errors[0].quantity and not is_whole
            if are_apart and not self.is_over:
                self._can_try(one.with_(two))

    def _is_possible(self, form: Form) -> bool:
        try:
            return bool(np.all(np.isfinite(self.bases[0].whole(form))))
        except Exception:  # the engine's, or a loss's, of labels that are none for it
            return False

    def _can_try(self, form: Form) -> bool:
        """Try a form; return False where a loss refuses the outputs of a later update, as PyTorch's do."""
        try:
            self._whole(form)
        except Exception:  # the engine's, or a loss's
            return False
        return True

    def _is_other(self, form: Form) -> bool:
        pairs = ((basis.whole(form), basis.whole()) for basis in self.bases)
        return any(np.linalg.norm(made - meant) > self.fits * np.linalg.norm(meant) for made, meant in pairs)

    def _whole(self, form: Form) -> None:
        self._solve(Level("the update", form, lambda basis: [basis.whole(form)], _first))

    def _by_piece(self, form: Form) -> None:
        if any(len(basis.sizes) > 1 for basis in self.bases):
            self._solve(Level("each microbatch", form, lambda basis: basis.used(form), lambda basis: basis.at(form)))

    def _by_row(self) -> None:
        most = max(sum(basis.sizes) for basis in self.bases)
        if most > MOST_ROWS or any(most + SPARE + 2 > len(basis.e.handed) for basis in self.bases):
            return
        self._solve(Level("rows", BASE, Basis.rows, lambda basis: np.arange(sum(basis.sizes))))

    def _shapes(self, form: Form) -> None:
        """Try factors of the rows that are proportional to a count, or that only some rows have."""
        for words in self.bases[0].shapes:
            factors = [basis.shapes[words] for basis in self.bases]
            has_levels = any(map(np.ptp, factors)) or "the number of the batch" in words
            is_other = has_levels or (not words.startswith("times") and np.ptp(np.concatenate(factors)))
            if is_other and not self.is_over:

                def of_rows(basis: Basis, words: str = words) -> np.ndarray:
                    return basis.shapes[words]

                def columns(basis: Basis, words: str = words) -> list[np.ndarray]:
                    return [basis.shaped(form, basis.shapes[words])]

                self._solve(Level("shape", form, columns, _first, words, of_rows))

    def _stale(self) -> None:
        """Try the gradient of an update before, of all its rows or of its last batch."""
        for steps in (1, 2):
            before = [_back(basis, steps) for basis in self.bases]
            if sum(e is not None for e in before) < 2:
                continue
            ways: dict[str, Callable[[Evidence], np.ndarray]] = {
                "update": lambda e: e.reference,
                "batch": lambda e: e.parts[-1] * (e.whole[0] / e.weights[-1][0].sum()) + e.penalty,
            }
            for word, way in ways.items():
                told = Error("the gradient", f"is that of the {word} {steps} before", ("stale gradients",))
                self._add([told], 1.0, [None if e is None else way(e) for e in before])

    def _by_term(self) -> None:
        """Try a number for the loss of each output, the same in all updates."""
        first = self.bases[0].e.terms[0]
        used: list[int] = np.flatnonzero(first.coefficients).tolist()
        meant, num = first.coefficients[used], len(used)
        if num < 2:
            return

        def told(numbers: np.ndarray) -> Error | None:
            counted = numbers * meant
            for number in (np.zeros(num), np.ones(num), meant):
                counted = np.where(np.abs(counted - number) <= SOLVED * np.abs(counted).max(), number, counted)
            numbers[:] = counted / meant
            if np.array_equal(counted, meant) or not np.any(counted):
                return None
            name = "loss weights ignored" if np.array_equal(counted, np.ones(num)) else _OTHER
            name = "output left out" if np.any(counted == 0) else name
            these, those = (", ".join(f"{number:.4g}" for number in each) for each in (counted, meant))
            names = ", ".join(first.names[i] for i in used)
            return Error(f"the losses of {names}", f"count {these}, and not {those}", (name,))

        self._mixed([[basis.of_term(i) for i in used] for basis in self.bases], told)

    def _mixed(self, columns: list[list[np.ndarray]], told: Callable[[np.ndarray], Error | None]) -> None:
        """Try numbers that are the same in all updates: solved for in one half, to hold in both."""
        half = list(zip(columns, self.bases, strict=True))[: (len(columns) + 1) // 2]
        numbers = np.median([least(own, basis.e.handed - basis.e.penalty)[0] for own, basis in half], axis=0)
        if np.all(np.isfinite(numbers)) and (error := told(numbers)) is not None:
            made = [numbers @ np.stack(own) + basis.e.penalty for own, basis in zip(columns, self.bases, strict=True)]
            self._add([error], 0.5 * len(numbers) if error.causes in ((), (_OTHER,)) else 1.0, made)

    def _assigned(self) -> None:
        rows: dict[int, np.ndarray] = {}
        for basis in self.bases:
            if (found := labels_of_others(basis.e)) is None:
                return
            rows |= zip((piece.called.order for piece in basis.e.update.pieces), found, strict=True)
        told = Error("the labels", "are each those of some other row", ("labels of other rows",))
        self._whole(Form((told,), rows=lambda e, piece: rows[piece.called.order]))

    def _solve(self, level: Level) -> None:
        for errors, cost, made, rests in solve(level, self.bases, self.fits):
            self._add(errors, cost, made, rests=rests)

    def _add(
        self,
        errors: list[Error],
        cost: float,
        made: Sequence[np.ndarray | None],
        bases: list[Basis] | None = None,
        rests: Sequence[Sequence[np.ndarray | None]] = (),
    ) -> None:
        pairs = zip(bases or self.bases, made, strict=True)
        proven = [None if each is None else basis.e.proven(each) for basis, each in pairs] if errors else []
        apart = max((each[1] for each in proven if each is not None), default=np.inf)
        if apart <= self.fits:
            named = sum(bool(error.causes) for error in errors)
            cost -= _NAMED * min(named, 1) + _NAMED_TOO * max(named - 1, 0)
            gradients = [None if each is None else each[0] for each in proven]
            self.found.append(Explanation(tuple(errors), cost, apart, gradients, rests))

    def _by_variable(self) -> None:
        for is_bare in (False, True) if self.has_penalty else (False,):
            if (explained := by_variable(self.bases, self.fits, is_bare=is_bare)) is not None:
                self._add(*explained)


def _first(basis: Basis) -> np.ndarray:
    return basis.starts[:1]


def _back(basis: Basis, steps: int) -> Evidence | None:
    """Return the evidence of the update `steps` before, if its gradient has the same parameters."""
    e: Evidence | None = basis.e
    for _ in range(steps):
        e = None if e is None else e.before
    return e if e is not None and len(e.handed) == len(basis.e.handed) else None


def in_words(error: Error, evidence: Sequence[Evidence]) -> Error:
    """Return an error with the weights and counts of its rows as their reader knows them."""
    told = error.number
    pieces = [(piece, w) for e in evidence for piece, w in zip(e.update.pieces, e.weights, strict=True)]
    is_even = all(np.all(weights[:, piece.rows != PAD] == 1) for piece, weights in pieces)
    is_given = evidence[0].meant.replay.data[2] is not None
    number = "the number of rows" if is_even else f"the sum of the {'sample ' * is_given}weights"
    if "counts" in str(error):
        for old, new in _COUNTED.items():
            told = told.replace(old, new.format(number))
    sizes = {sum(e.update.sizes) - sum(e.pads) for e in evidence}
    if is_even and len(sizes) == 1:
        (num,) = sizes
        rows = f"{num}, as the update has {many(num, 'row')}"
        told = told.replace(f" instead of 1 / {number} of the update", f" instead of 1 / {rows}")
    return replace(error, number=told)
