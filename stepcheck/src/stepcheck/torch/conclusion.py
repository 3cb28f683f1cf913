"""From a script that trained modules to its reports; the data are found by the module's inputs and the labels."""

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepcheck.errors import SpecificationError
from stepcheck.port import ByPass
from stepcheck.report.report import Report
from stepcheck.stages.judge import Case
from stepcheck.torch.data import Data, as_given, by_pass_of, called_for
from stepcheck.torch.scout import Scout, Seen
from stepcheck.torch.state import array, undrawn, unpacked, values
from stepcheck.torch.supposing import ModelsOwn, of_other_rows
from stepcheck.torch.watch import close
from stepcheck.trace.log import Called
from stepcheck.trace.windows import PAD, Rows

_MOST_ROWS, _MOST_BYTES, _SECONDS = 20_000, 2**28, 10.0  # of a dataset that is read as a whole
_HALF = 0.5  # of the rows that a module was given
_FEW = 6  # passes by which labels are compared

_NONE = "any update: no call of a trainable module of PyTorch with an optimizer step was seen"
_NO_ROWS = "the data of {}: no pass has tensors of rows"
_NO_LABELS = (
    "the form of the loss: no call of a loss of PyTorch's of outputs and labels was seen. Pass it: "
    "stepcheck.watch(..., loss=...)"
)
_COUNTED = (
    "The model is told to divide by {} items in update 1 (`num_items_in_batch`), and its batches have {} places whose "
    "next one is predicted: a first place has a label too, which nothing predicts."
)
_SEVERAL = "the form of the losses: the script trains several modules. Pass one and its loss: stepcheck.watch(...)"
_ENDED = (
    "the rest of the script: it was ended when enough was seen, so nothing is known of what comes after; `--updates` "
    "lets it run longer"
)
_CLOSED = "the updates after these: enough was seen; `--updates` looks at more"


class Source(NamedTuple):
    """Arrays of equally many rows, by their names; and all in words, if they have none of the script's."""

    told: str
    leaves: dict[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.leaves.values()), ()))


def sources(loaders: list[Any], arrays: dict[str, Any]) -> Iterator[Source]:
    """Yield the datasets of loaders, read as a whole, and a script's arrays, by their number of rows."""
    for loader in loaders:
        if (leaves := _read(loader)) is not None:
            yield Source("the DataLoader's dataset", leaves)
    named = {name: array(v) if isinstance(v, Tensor) else v for name, v in arrays.items()}
    for num in sorted({len(v) for v in named.values()}, reverse=True):
        own = {name: v for name, v in named.items() if len(v) == num and v.dtype.kind in "fiub"}
        yield Source("", own)


def _read(loader: Any) -> dict[str, np.ndarray] | None:
    """Return the leaves of all items of a loader's dataset, put together as the loader does."""
    try:
        num = len(loader.dataset)
        if num > _MOST_ROWS:
            return None
        until, items = time.monotonic() + _SECONDS, []
        with undrawn(loader.dataset):
            for i in range(num):
                items.append(loader.dataset[i])
                if time.monotonic() > until or i * _size(items[0]) > _MOST_BYTES:
                    return None
            whole = loader.collate_fn(items)
        leaves = {str(i): array(leaf) for i, leaf in enumerate(unpacked(_as_dicts(whole)).leaves)}
        return {name: leaf for name, leaf in leaves.items() if leaf.ndim and len(leaf) == num}
    except Exception:  # a stream, rows of different shapes: the user's own code
        return None


def _as_dicts(whole: Any) -> Any:
    """Return a nest whose other mappings are dicts, and whose arrays are tensors."""
    if hasattr(whole, "items") and not isinstance(whole, dict):
        return dict(whole.items())
    if isinstance(whole, tuple | list):
        return [_as_dicts(part) for part in whole]
    return torch.as_tensor(whole) if isinstance(whole, np.ndarray) else whole


def _size(item: Any) -> int:
    """Return the bytes of an item's tensors."""
    return sum(leaf.nbytes for leaf in unpacked(_as_dicts(item)).leaves)


def found(called: list[Called], targets: dict[int, np.ndarray], known: Iterable[Source]) -> Data:
    """Return the data of forward passes.

    Args:
        called: the passes of which a gradient was taken.
        targets: by the order of a pass the labels that its loss was given.
        known: the data that the script has.
    """
    best, most = None, _HALF
    for source in known:
        names, coverage = _inputs(called, source)
        is_smaller = best is not None and source.num_rows < best[0].num_rows
        if coverage > most or (coverage == most == 1 and is_smaller):
            best, most = (source, names), coverage
    if best is None:
        return as_given(called, targets)
    source, names = best
    inputs = [_shaped(source.leaves[name], leaf) for name, leaf in zip(names, called[0].inputs, strict=True)]
    x = inputs[0] if len(inputs) == 1 else tuple(inputs)
    name = _labels(called, targets, Rows(x), source, names)
    told = source.told or ", ".join(dict.fromkeys([*names, *([] if name is None else [name])]))
    told = f"data: {told}, {len(inputs[0])} rows"
    beside = {_in_words(each, source): leaf for each, leaf in source.leaves.items() if each not in names}
    if name is None and targets:
        told = f"{told}; labels: as the loss gets them"
        return Data(x, np.zeros(len(inputs[0])), by_pass_of(called, targets), told, beside)
    return Data(x, np.zeros((len(inputs[0]), 0)) if name is None else source.leaves[name], None, told, beside)


def _in_words(name: str, source: Source) -> str:
    return f"part {name} of {source.told}" if source.told else name


def _shaped(leaf: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return rows in the shape that they have as inputs."""
    is_same = leaf[:1].size == like[:1].size
    return leaf.reshape(len(leaf), *like.shape[1:]) if is_same else leaf


def _inputs(called: list[Called], source: Source) -> tuple[list[str], float]:
    """Return (the names of the inputs among the leaves, the share of the rows that are theirs)."""
    names, least = [], 1.0
    for i, like in enumerate(called[0].inputs):
        shares = {}
        for name, leaf in source.leaves.items():
            if leaf[:1].size == like[:1].size or (leaf.ndim == like.ndim > 1 and leaf.shape[2:] == like.shape[2:]):
                rows = Rows(_shaped(leaf, like))
                found = [rows.find([each.inputs[i]]) for each in called if len(each.inputs) == len(called[0].inputs)]
                shares[name] = float(np.mean(np.concatenate(found) != PAD)) if found else 0.0
        largest = max(len(each.inputs[i]) for each in called)
        if not shares:
            return [], 0.0
        name = max(shares, key=shares.__getitem__)
        if len(called) > 1 and len(source.leaves[name]) <= largest:  # a batch
            return [], 0.0
        names.append(name)
        least = min(least, shares[name])
    return names, least


def _labels(
    called: list[Called], targets: dict[int, np.ndarray], rows: Rows, source: Source, inputs: list[str]
) -> str | None:
    """Return the name of the leaf whose rows the loss was given; or of the only one that is no input."""
    own = [
        (targets[c.order], found)
        for c in called[:_FEW]
        if c.order in targets and np.all((found := rows.find(c.inputs)) != PAD)
    ]
    agree = {}
    for name, leaf in source.leaves.items():
        pairs = [(t, leaf[found]) for t, found in own if len(found) and t.size == leaf[found].size]
        equal = [np.mean(np.ravel(t) == np.ravel(part).astype(t.dtype)) for t, part in pairs]
        agree[name] = float(np.mean(equal)) if equal else 0.0
    rest = [name for name in source.leaves if name not in inputs]
    alike = [name for name in rest if own and all(_may_be(target, source.leaves[name]) for target, _ in own)]
    best = max(agree, key=lambda name: (agree[name], name in rest), default=None)
    if best is not None and agree[best] > _HALF and own:
        return best
    is_pair = len(rest) == 1 and len(source.leaves) == len(inputs) + 1 and not own
    return rest[0] if is_pair else alike[0] if len(alike) == 1 else None


def _may_be(target: np.ndarray, leaf: np.ndarray) -> bool:
    """Whether labels have the dtype, the shape and the values of some rows."""
    return target.dtype == leaf.dtype and target[:1].size == leaf[:1].size and bool(np.all(np.isin(target, leaf)))


def _apart(called: list[Called], data: Data) -> Iterator[str]:
    """Yield a note if the labels that the loss gets are those of an array of the script, but of other rows."""
    if data.by_pass is None:
        return
    passes = [each for each in called if each.order in data.by_pass]
    labels = [data.by_pass[each.order][0] for each in passes]
    is_one_kind = len({y.shape[1:] for y in labels}) == 1
    if is_one_kind and all(y.shape[:1] == each.inputs[0].shape[:1] for y, each in zip(labels, passes, strict=True)):
        rows = Rows(data.x)
        found = np.concatenate([rows.find(each.inputs) for each in passes])
        yield from islice(of_other_rows(np.concatenate(labels), found, data.beside), 1)


def conclude(ran: Any) -> list[Report]:
    """Return the reports of the audits that a script made itself, or else those on its modules.

    Raises:
        SpecificationError: no module was trained.
    """
    scout: Scout = ran.scout
    if scout.limit.reports:
        over = [report for report, _ in scout.limit.reports if report.is_over]
        if not over:
            raise SpecificationError("the loop: the script's own audit has ended with an error")
        return over
    for each in scout.watched:
        if each.group and (elsewhere := each.group.gather(each.watcher, each.calls, has_failed=bool(ran.how))):
            report = Report()
            report.elsewhere = elsewhere
            return [report]
    trained = [each for each in scout.watched if each.log.applied or _has_gradient(each)]
    scout.flow.share([each.watcher for each in trained])
    if not trained:
        unseen = [told for each in scout.watched for told in each.log.unseen]
        raise SpecificationError("; ".join(filter(None, [scout.elsewhere, *unseen])) or _NONE)
    known = [*sources(scout.loaders, scout.arrays)]
    reports = []
    for each in trained:
        others = [other for other in trained if other is not each and _are_together(each, other)]
        reports.append(_report(ran, each, known, is_one_of_several=len(trained) > 1, has_others=bool(others)))
    reports.sort(key=lambda report: (not report.causes, not report.has_likely))
    return reports


def _are_together(one: Seen, two: Seen) -> bool:
    """Whether two modules are trained at the same time, and not one after the other as in folds."""
    spans = [(min(orders), max(orders)) for orders in ([*each.log.orders()] for each in (one, two))]
    return max(first for first, _ in spans) < min(last for _, last in spans)


def _has_gradient(seen: Seen) -> bool:
    return any(called.differentiated for called in seen.log.called)


def _counted(seen: Seen) -> str | None:
    """Return the note on a model that divides by its labels, where its loss leaves out first places."""
    end = seen.log.applied[0].order if seen.log.applied else 0
    first = [own for order, own in seen.watcher.own.items() if order < end]
    if not first or first[0].num is None or any(own.labels.ndim != 2 for own in first):
        return None
    whole, moved = (sum(int((own.labels[:, start:] != -100).sum()) for own in first) for start in (0, 1))
    return _COUNTED.format(whole, moved) if first[0].num == whole > moved else None


def _report(ran: Any, seen: Seen, known: list[Source], *, is_one_of_several: bool, has_others: bool) -> Report:
    scout, log, report = ran.scout, seen.log, Report()
    called = called_for(log)
    own: dict[int, np.ndarray] = {order: each.labels for order, each in seen.watcher.own.items()}
    if not called:
        raise SpecificationError(_NO_ROWS.format(type(seen.model).__name__))
    data = found(called, own or seen.calls.targets, known)
    by_pass: ByPass | None = {order: (labels,) for order, labels in own.items()} if own else data.by_pass
    has_labels = bool(own) or data.has_labels
    why = _SEVERAL if has_others else "" if has_labels else _NO_LABELS
    how: dict[str, Any] = {"by_pass": by_pass, "why_unknown": why, "labels": data.beside}
    made: Case = close(report, seen.watcher, seen.calls, (data.x, data.y, None), seen.before, **how)
    made.origin = data.origin
    made.ended = None if scout.limit.has_stopped or scout.loop.is_closed or ran.how else values(seen.model)
    report.taken.append(data.told)
    log.notes.update(dict.fromkeys(() if own else _apart(called, data)))
    is_shifted = isinstance(made.objective, ModelsOwn) and made.objective.shift == 1
    if is_shifted and (told := _counted(seen)) is not None:
        log.notes[told] = None
    if is_one_of_several:
        report.taken.append(f"module: {scout.names.get(id(seen.model), type(seen.model).__name__)}")
    if scout.limit.has_stopped:
        report.unseen.append(_ENDED)
    elif scout.loop.is_closed:
        report.unseen.append(_CLOSED)
    if ran.how:
        report.unseen.append(f"the rest of the loop: {ran.how}")
    return report
