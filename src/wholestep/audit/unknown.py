"""What can be told of a gradient that nothing known reproduces."""

from dataclasses import replace

import numpy as np

from wholestep.audit.by_row import derivative, solve
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Found, not_known, numbers_of
from wholestep.audit.proof_of_gradients import proved
from wholestep.audit.source import line_of_loss


def unknown(differing: list[Evidence]) -> Found:
    """Tell what can be told of a difference that nothing known reproduces: the rows' factors, or the parameters."""
    e = differing[0]
    told = _along(differing) or _solved(e, is_plain=True) or _penalised(e)
    found = None if told else derivative(e)
    in_the_loss, detail = ("", "") if found is None else (_in_the_loss(*found), _on_a_row(e, *found))
    told = told or in_the_loss or _solved(e, is_plain=False)
    if not told:
        differs = e.meant.replay.tolerance.differs
        off = {name: apart for name, apart in e.by_parameter(e.reference).items() if apart > differs}
        told = f"the variables that differ: {', '.join(f'{name} ({apart:.1g})' for name, apart in off.items())}"
    explanation = f"The gradient of update {e.update.number} is not that of the loss that was meant; {told}."
    numbers = [each.update.number for each in differing]
    line = line_of_loss(e.update.pieces[-1].called.line)
    without, proof = max(each.without for each in differing), proved(differing[-1], None)
    cause = not_known("gradient", explanation, without, line or e.update.applied.line, numbers, proof)
    return replace(cause, detail=detail)


def is_along(e: Evidence) -> bool:
    """Whether a gradient is the one that was meant times some number above 0."""
    share = _share(e)
    return share > 0 and e.apart(share * e.reference) <= e.meant.replay.tolerance.fits


def _share(e: Evidence) -> float:
    size = float(e.reference @ e.reference)
    return float(e.handed @ e.reference) / size if size else 0.0


def _along(differing: list[Evidence]) -> str:
    """Return by which numbers the gradients were multiplied, in words; "" if that is not all."""
    if not all(map(is_along, differing)):
        return ""
    shares = [f"{_share(e):.4g}" for e in differing[:4]]
    return f"it is that gradient times {', '.join(shares)}{', ...' if differing[4:] else ''}, update by update"


def _solved(e: Evidence, *, is_plain: bool) -> str:
    """Return the factors of the rows that would make the gradient, in words; "" if none would."""
    if (found := solve(e)) is None:
        return ""
    solved, should = found
    if is_plain and len(set(np.round(solved / np.abs(solved).max(), 3).tolist())) > len(solved) // 2:
        return ""  # each row another factor: that is another loss
    return f"its rows count {_counted(solved)} instead of {_counted(should)}"


def _penalised(e: Evidence) -> str:
    """Return how often the model's own losses would have to count, in words; "" if that does not make the gradient."""
    size, rest = float(e.penalty @ e.penalty), e.handed - e.reference
    share = 1 + float(rest @ e.penalty) / size if size else 1.0
    fits = e.apart(e.reference + (share - 1) * e.penalty) <= e.meant.replay.tolerance.fits
    return f"the model's own losses count {share:.4g} times instead of once" if fits else ""


def _counted(factors: np.ndarray) -> str:
    values, counts = np.unique(np.round(factors, 4), return_counts=True)
    return ", ".join(f"{v:.4g} x {n}" for v, n in list(zip(values, counts, strict=True))[:6])


def _in_the_loss(solved: np.ndarray, should: np.ndarray) -> str:
    """Return in words the derivative by the outputs that the loop's loss has, and that of the loss meant.

    The gradient of any loss of the outputs is a sum of the outputs' own gradients: if it is one here, the model, the
    tape and the variables are right, whatever the loss.
    """
    far = np.argsort(-np.abs(solved - should))[:3]
    shown = ", ".join(f"{solved[i]:.3g} instead of {should[i]:.3g}" for i in far)
    return (
        "the model, the tape and the variables are right, so it is in the loss: its derivative by the outputs is "
        f"{shown}, where they differ most"
    )


def _on_a_row(e: Evidence, solved: np.ndarray, should: np.ndarray) -> str:
    """Return in words what can be compared by hand: one row, its label and output, and what both losses make of it."""
    pieces = e.update.pieces
    if any(len(piece.called.outputs) != 1 for piece in pieces) or not hasattr(e.meant.replay.data[1], "shape"):
        return ""
    starts = np.cumsum([0, *(piece.called.outputs[0].size for piece in pieces)])
    place = int(np.argmax(np.abs(solved - should)))
    which = int(np.searchsorted(starts, place, "right")) - 1
    piece, terms, out = pieces[which], e.terms[which], pieces[which].called.outputs[0]
    width = out.size // len(out)
    at = (place - int(starts[which])) // width
    part = slice(int(starts[which]) + at * width, int(starts[which]) + (at + 1) * width)
    label = e.meant.replay.batch(piece)[1][at]
    values, weights = terms.values[:, at].sum(), terms.weights[:, at].sum()
    loss = f"the loss that was meant is {values / weights:.4g}, " if weights else ""
    return (
        f"On row {piece.rows[at]} of the data, label {numbers_of(label)}, output {numbers_of(out[at])}: {loss}with "
        f"derivative {numbers_of(should[part])} by the output in this batch; the loop's has {numbers_of(solved[part])}."
    )
