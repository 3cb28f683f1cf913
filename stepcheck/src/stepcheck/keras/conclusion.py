"""From a script that ran to the reports on it, with notes on the code around its updates."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, product
from types import GeneratorType
from typing import NamedTuple

import keras
import numpy as np

from stepcheck import tree
from stepcheck.command.script import Ran
from stepcheck.errors import SpecificationError
from stepcheck.keras.chain import allied, divergence, has_generated, still, teachers
from stepcheck.keras.derived import APART, as_narrow, passes
from stepcheck.keras.families import name_of, usual
from stepcheck.keras.meaning import weighed
from stepcheck.keras.replay import Replay, values
from stepcheck.keras.scout import Scout
from stepcheck.keras.searching import UNKNOWN_ROWS, Meaning, UnknownError, labels_of
from stepcheck.keras.supposing import Supposed, inquire, observed, possible, stated, subjects, why_unknown
from stepcheck.keras.surroundings import Surroundings, is_gone_over_again
from stepcheck.keras.watch import case
from stepcheck.report.found import Finding, Likely, many, numbers_of, own_fault
from stepcheck.report.report import Report
from stepcheck.stages.judge import Case, Verdict
from stepcheck.stages.unsolved import by_frequency, explains, notes_on
from stepcheck.trace.log import Log, Values
from stepcheck.trace.loops import Loop, Watched
from stepcheck.trace.rows import EQUAL_ROWS, mixed
from stepcheck.trace.windows import PAD, Rows, Windows, keys

_SECONDS = 90  # of the search for a loss that is not known; the one that is tried then is tried to its end
_SECONDS_OF_ALL = 40  # of the reports on several models
_SUM = "The loss is a sum of means: of rows of the data, and of rows that another model has made."
_ENDED = (
    "the rest of the script: it was ended when enough was seen, so nothing is known of the values that it writes back "
    "at its end; `--updates` lets it run longer"
)
_MOST_OTHERS = 0.02  # of the rows, whose labels may be redrawn
_SLACK = 1  # batch: the script may be ended before its metrics get the last one, or while it computes the next


def conclude(ran: Ran) -> list[Report]:
    """Return the reports of the audits that a script made itself, or else the report on its loop.

    Raises:
        UnknownError: the intention of the script cannot be found.
    """
    scout = ran.scout
    if scout.limit.reports:
        over = [report for report, _ in scout.limit.reports if report.is_over]
        if not over:
            raise UnknownError("the loop: the script's own audit has ended with an error")
        return over
    reports, unseen = list[Report](), list[str]()
    until, unknown = time.monotonic() + _SECONDS_OF_ALL, None
    for loop, watched in subjects(scout):
        if reports and time.monotonic() > until:
            unseen.append(f"the model {watched.model.name!r}, {loop.place}: the time is up")
            continue
        try:
            reports.append(_report(ran, loop, watched))
        except UnknownError as error:
            unknown = unknown or error
            unseen.append(f"the model {watched.model.name!r}, {loop.place}: {error}")
    if unknown is not None and not reports:
        raise unknown
    reports.sort(key=lambda report: (not report.causes, not report.has_likely))
    reports[0].unseen.extend(unseen)
    return reports


def _report(ran: Ran, loop: Loop, watched: Watched) -> Report:
    scout, meaning, report = ran.scout, inquire(loop, watched), Report()
    *_, last = (each for each in scout.loops.values() if id(watched.model) in each.watched or each is loop)
    has_ended = last is loop and not (loop.is_closed or scout.limit.has_stopped or ran.how)
    has_ended = has_ended and not watched.log.is_cut
    made, verdict = _judged(meaning, scout.around, values(watched.model) if has_ended else None)
    own = {id(layer) for layer in watched.model._flatten_layers()}
    others = [each for each in loop.watched.values() if id(each.model) not in own and each.log.applied]
    if has_generated(watched, others):
        verdict.make_note("summed over microbatches", _SUM)
    verdict.unseen += [*_leave_out(verdict, meaning, len(others)), *meaning.unseen]
    found = [each for other in others for each in verdict.look("the divergence", divergence, watched, other)]
    verdict.add(each for each in found if isinstance(each, Likely))
    meaning.told += [str(each) for each in found if not isinstance(each, Likely)]
    report.close(made, verdict)
    report.taken += meaning.told
    verdict.notes += meaning.notes
    if verdict.unjudged:
        verdict.check("the rows of the loss", _of_loss, meaning)
    elif made.data[2] is not None and isinstance(made.data[1], np.ndarray):
        verdict.check("the weights of classes", by_frequency, made.data[1], np.asarray(made.data[2]))
    verdict.check("uses of the model", _outdated, scout, watched)
    verdict.check("generators", _used_up, scout, watched, verdict.seen)
    verdict.check("the labels of the losses", _of_labels, loop)
    verdict.check("the passes of an update", _through, verdict)
    verdict.check("models against each other", allied, watched, others)
    verdict.check("other models", still, loop, watched)
    verdict.check("models that nothing moves", teachers, loop, watched, own)
    verdict.check("the labels of the rows", _come_apart, made, watched)
    verdict.check("mixtures of rows", _mixtures, scout, loop, watched, None if verdict.has_seen else made.data)
    if verdict.seen is not None:
        verdict.check("the metrics", _running, scout, watched.log, verdict.seen)
    if scout.is_cut_short and loop.lines and loop is [*scout.loops.values()][-1]:
        report.unreached = f"code that may train after {loop.lines[-1]}, which was not reached"
    unseen = {
        _ENDED: scout.limit.has_stopped,
        "the loops after this one: the script was ended before them": scout.is_cut_short and not report.unreached,
        f"{many(scout.num_warm_up, 'update')} outside of the loops": scout.num_warm_up,
        f"the rest of the loop: {ran.how}": ran.how,
    }
    report.unseen.extend(told for told, is_so in unseen.items() if is_so)
    return report


def _come_apart(made: Case, watched: Watched) -> Iterator[Likely]:
    """Yield a note if the loss gets a row's class as another one in another pass."""
    rows, of_row, counts = Rows(made.data[0]), dict[int, set[int]](), Counter[int]()
    for called in watched.log.called:
        label = np.asarray((made.by_pass or {}).get(called.order, (np.zeros(0),))[0])
        is_class = label.dtype.kind in "iub" and label.size == len(label) == len(called.inputs[0])
        if is_class and len({*keys(called.inputs)}) < len(label):
            return
        for row, own in zip(rows.find_clear(called.inputs), label.reshape(-1), strict=False) if is_class else ():
            of_row.setdefault(int(row), set()).add(int(own))
            counts[int(row)] += int(row) != PAD
    of_row.pop(PAD, None)
    if not of_row or max(counts.values()) > 1 + min(counts[row] for row in of_row):
        return  # an input may have several labels in a pass, as a word and the words around it
    if _MOST_OTHERS * len(of_row) < (num := sum(len(own) > 1 for own in of_row.values())):
        yield Likely(f"Of {len(of_row)} rows {num} get another label in another pass. {APART}")


def _mixtures(scout: Scout, loop: Loop, watched: Watched, data: tuple | None) -> Iterator[Finding]:
    """Yield a note if the inputs are mixtures of two rows of the data, or else of an array of the script."""
    calls = watched.log.called
    given = [(g.called.inputs, g.label) for loss in loop.losses.values() for g in labels_of(calls, calls, loss)]
    if not given or len(given[0][0]) != 1:
        return
    (first,), label = given[0]
    arrays = [named.value for named in scout.around.arrays()] if data is None else [*tree.leaves(data[0]), data[1]]
    sources = [a for a in arrays if a.shape[1:] == first.shape[1:] and len(a) > len(first)]
    for x, y in product(sources, arrays):
        is_class = y.shape[1:] == () and y.dtype.kind in "iu" and label.ndim == 2
        own = np.eye(label.shape[1])[np.clip(y, 0, label.shape[1] - 1)] if is_class else y
        fits = len(own) == len(x) and own is not x and own.shape[1:] == label.shape[1:] and own.dtype.kind in "iuf"
        if fits and (found := [*mixed(x, own, given)]):
            yield from found
            return


def _leave_out(verdict: Verdict, meaning: Meaning, num_others: int) -> list[str]:
    """Return the unchecked parts. An unknown gradient may hold more losses than the script calls."""
    unknown = [c for c in verdict.of_gradient if not c.is_listed]
    if not unknown or not (num_others or meaning.loss is not None):
        return []
    verdict.causes = [c for c in verdict.causes if c not in unknown]
    name = "the loss" if meaning.loss is None else name_of(meaning.loss)
    if unknown[0].is_known or all(e.is_along for e in verdict.evidence):
        verdict.notes.append(f"The gradient is that of {name}, but: {unknown[0].explanation} Is that meant?")
        return []
    verdict.has_loss, verdict.unjudged = False, f"the gradient is not that of {name} alone"
    more = f"if nothing else is meant to be in the loss, something is wrong: {unknown[0].explanation}"
    return [f"the gradient: it is not that of {name} alone; {more}"]


def _judged(meaning: Meaning, around: Surroundings, ended: Values | None) -> tuple[Case, Verdict]:
    """Return the case by the loss that is meant, or by the first loss that explains the gradients, and its verdict."""
    why, known = why_unknown(meaning), list[tuple[Case, Verdict]]()
    for supposed in stated(meaning):
        try:
            known.append(_tried(meaning, supposed, ended))
        except UnfitError as unfit:
            why = str(unfit)
            continue
        verdict = known[-1][1]
        is_open = EQUAL_ROWS in verdict.notes and not verdict.evidence  # other labels or weights may be meant
        if not verdict.of_gradient and not is_open:
            meaning.told += ["the sums of this loss are divided by the rows or their weights"] * (len(known) > 1)
            return known[-1]
    if known and explains((best := min([*known[1:], *known[:1]], key=_num_errors))[1]):
        return best
    until = time.monotonic() + _SECONDS
    for supposed in possible(meaning, around):
        if time.monotonic() > until:
            why = f"{why}; the search for others was ended after {_SECONDS} seconds"
            break
        try:
            made, verdict = _tried(meaning, supposed, ended)
        except UnfitError:
            continue
        if explains(verdict):
            meaning.told = [each for each in meaning.told if not each.startswith("loss: ")]  # another, or one part
            told = "from the gradients: if another is meant, `stepcheck.watch(model, data=(x, y), loss=...)` states it"
            meaning.told.append(f"loss: {supposed.told}, supposed {told}")
            meaning.notes += [supposed.note] * bool(supposed.note)
            return made, verdict
    if known:
        return known[0]
    made = _case(meaning, observed(meaning), ended)
    say = "Say which is meant: `with stepcheck.watch(model, data=(x, y), loss=...)`"
    verdict = made.judge()
    verdict.check("the losses of one row", _side_by_side, meaning)
    meaning.unseen.append(f"the loss and its gradients: {why}. {say}")
    return made, verdict


class UnfitError(Exception):
    """A loss that does not take the labels and outputs; the message says why."""


def _tried(meaning: Meaning, supposed: Supposed, ended: Values | None) -> tuple[Case, Verdict]:
    """Return the case by this loss and its verdict; `UnfitError` if the loss takes no such labels and outputs."""
    try:
        made = _case(meaning, supposed, ended)
        if (failed := (verdict := made.judge()).failed) is not None:
            raise failed
        return made, verdict
    except Exception as error:  # the loss is called as the audit has put it together, and not as the script calls it
        if isinstance(error, UnknownError) and not supposed.told:
            raise
        of_script = "the script's loss does not take labels and the model's outputs as they are"
        raise UnfitError(own_fault(error) or f"{of_script} ({type(error).__name__})") from error


def _num_errors(judged: tuple[Case, Verdict]) -> tuple[int, int]:
    causes = judged[1].of_gradient
    return sum(not cause.is_listed for cause in causes), len(causes)


def _side_by_side(meaning: Meaning) -> Iterator[str]:
    """Yield a note of one row: the script's loss and the first usual loss that fits."""
    x, y, *_ = meaning.data
    called = next((each for each in meaning.watched.log.called if each.outputs and each.inputs), None)
    rows = [] if called is None else Rows(x).find(called.inputs).tolist()
    at = next((i for i, row in enumerate(rows) if row != PAD), None)
    if called is None or at is None or not meaning.own or not meaning.has_labels or not hasattr(y, "shape"):
        return
    out = called.outputs[0][at : at + 1]
    label = as_narrow(np.asarray(y)[rows[at]][None], out[..., 0])
    if (likely := next(usual(called.outputs, y), None)) is not None:
        both = meaning.own[0], likely
        own, other = (float(np.mean(np.asarray(keras.ops.convert_to_numpy(loss(label, out))))) for loss in both)
        told = f"On row {rows[at]}, label {numbers_of(label)}, output {numbers_of(out)}: "
        yield f"{told}{name_of(meaning.own[0])} of the script is {own:.4g}, {likely.name} is {other:.4g}."


def _through(verdict: Verdict) -> Iterator[str]:
    """Yield a note if the gradient of each update goes through passes on several lines."""
    updates = verdict.seen.updates if verdict.seen is not None else []
    lines = [tuple(dict.fromkeys(str(piece.called.line) for piece in u.pieces)) for u in updates]
    if lines and len(lines[0]) > 1 and len({*lines}) == 1:
        told = f"The gradient of each update goes through {len(lines[0])} forward passes: {'; '.join(lines[0])}. "
        yield f"{told}If one of them makes a target, a `stop_gradient` is missing there."


def _of_labels(loop: Loop) -> Iterator[str]:
    """Yield notes of losses of probabilities that get labels below 0, or of some rows nothing but zeros."""
    for asked in loop.losses.values():
        name = name_of(asked.loss)
        if name.lower().replace("_", "") not in ("kldivergence", "categoricalcrossentropy"):
            continue
        rows = [np.any(y, axis=1) for _, y, weight in asked.calls if y.ndim == 2 and weight is None]
        empty = [not row for own in rows for row in own[: 1 + max(np.flatnonzero(own), default=-1)]]  # no padding
        if any(np.any(y < 0) for _, y, _ in asked.calls):
            yield Likely(f"{name} gets labels below 0: it takes probabilities for both. Is a softmax missing?")
        elif any(empty):
            told = f"{name} gets labels that are all 0 in {np.mean(empty):.0%} of its rows: these have no loss. Is that"
            yield f"{told} meant? `one_hot` gives zeros for classes outside of its range, which begins with 0."


def _of_loss(meaning: Meaning) -> Iterator[str]:
    """Yield the first note on a derivative of other labels, along another axis, or of rows that count otherwise."""
    x, y, *_ = meaning.data
    derived = passes(meaning.watched.log, Rows(x), 0)
    if not derived or any(len(called.outputs) > 1 for called in meaning.watched.log.called):
        return
    labels = meaning.labels or ({"the data": y} if meaning.has_labels else meaning.beside)
    labels = {name: each for name, each in labels.items() if isinstance(each, np.ndarray)}
    yield from notes_on(Replay(meaning.watched.model, (x, y, None)), derived, labels, meaning.beside)


def _case(meaning: Meaning, supposed: Supposed, ended: Values | None) -> Case:
    watched = meaning.watched
    try:
        # Not the present weights: a step of JAX that was ended halfway has given them up.
        given = supposed.data, supposed.loss, watched.log
        made = case(watched.model, *given, optimizer=meaning.optimizer, before=watched.before)
        made.data, made.objective = weighed(made.model, made.data, made.objective)
    except SpecificationError as error:
        raise UnknownError(f"the data and the loss: {error}") from error
    is_compiled = supposed.loss is None  # then its faults are no matter of what is supposed
    made.supposed, made.is_called = "" if is_compiled else supposed.told, supposed.is_called
    is_known = supposed.data[0] is meaning.data[0] and not any(UNKNOWN_ROWS in told for told in meaning.unseen)
    made.origin = "found" if is_known else "as given"
    made.has_weights = supposed.has_weights
    made.by_pass = supposed.by_pass
    made.ended = ended
    return made


def _used_up(scout: Scout, watched: Watched, seen: Windows | None) -> Iterator[str]:
    """Yield a note of a generator that a loop of epochs iterates over, and that was empty after the first."""
    line = next((each.line for each in reversed(watched.log.called) if each.line is not None), None)
    num_passes = len({number for number, _ in seen.place.values()}) if seen is not None else 2
    if num_passes > 1 or line is None or scout.limit.has_stopped:
        return
    generators = [n.name for n in scout.around.named(GeneratorType) if n.value.gi_frame is None]
    told = "The generator {!r} is used up after the first epoch: the others have no batch. Make it in each."
    yield from [Likely(told.format(name)) for name in generators if is_gone_over_again(line.file, name)][:1]


def _outdated(scout: Scout, watched: Watched) -> Iterator[str]:
    if (use := scout.outdated.get(id(watched.model))) is not None:
        told = f"`{use.name}` uses the model with the weights of the beginning, after updates: those that were trained "
        yield Likely(f"{told}have not come back to the model. Assign them to its variables first. ({use.line})")


class _Round(NamedTuple):
    """A pass over the data, or an evaluation between two: its batches, and their rows."""

    num: int
    rows: int


def _running(scout: Scout, log: Log, seen: Windows) -> Iterator[str]:
    """Yield a note of the metrics that have counted since the beginning, though several passes were made.

    A mean counts its batches, or the rows. It is likely a fault, if a metric is read more than once.
    """
    kinds = [kind for kind in (_passes(seen), _evaluations(log, seen)) if len(kind) > 1]
    whole = [_Round(sum(each.num for each in kind), sum(each.rows for each in kind)) for kind in kinds]
    single = [each for kind in kinds for each in kind]
    size = max((each.rows / each.num for each in single), default=0.0) or 1.0  # rows of a batch

    def is_of(count: float, rounds: list[_Round], most: int) -> bool:
        """Whether it counts the batches, or the rows, of a round, or at most `most` batches more."""
        more = [delta for r in rounds for delta in (count - r.num, (count - r.rows) / size)]
        return any(-_SLACK <= delta <= most for delta in more)

    counts = {metric: _count(metric) for key, metric in scout.metrics.items() if key not in scout.resets}
    running = [m for m, c in counts.items() if is_of(c, whole, _SLACK + log.num_late) and not is_of(c, single, _SLACK)]
    if names := sorted(metric.name for metric in running):
        told = f"The metrics {', '.join(names)} have" if len(names) > 1 else f"The metric {names[0]} has"
        told += " counted since the beginning, over several passes: what is read is no number of the last one."
        told += " Is `reset_state()` missing where a pass begins?"
        yield Likely(told) if any(scout.num_read[id(metric)] > 1 for metric in running) else told


def _passes(seen: Windows) -> list[_Round]:
    rounds = [[*own] for _, own in groupby(seen.pieces, key=lambda piece: seen.place[piece.called.order][0])]
    return [_Round(len(own), sum(len(piece.rows) for piece in own)) for own in rounds]


def _evaluations(log: Log, seen: Windows) -> list[_Round]:
    """Return the runs of forward passes without gradient between two with one."""
    own = {piece.called.order for piece in seen.pieces}
    runs = [[*run] for is_own, run in groupby(log.called, key=lambda called: called.order in own) if not is_own]
    num_rows = [sum(len(c.inputs[0]) for c in run if c.inputs and c.inputs[0].ndim) for run in runs]
    return [_Round(len(run), num) for run, num in zip(runs, num_rows, strict=True)]


def _count(metric: keras.metrics.Metric) -> float:
    """Return the count of a mean; NaN if it is none, or is being traced."""
    try:
        return float(np.asarray(keras.ops.convert_to_numpy(metric.count)))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return float("nan")
