"""What can be told of a gradient that nothing known reproduces."""

import numpy as np

from wholestep.audit.by_row import derivative, solve
from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Found, not_known
from wholestep.audit.proof_of_gradients import proved
from wholestep.audit.source import line_of_loss


def unknown(differing: list[Evidence]) -> Found:
    """Tell what can be told of a difference that nothing known reproduces: the rows' factors, or the parameters."""
    e = differing[0]
    told = _along(differing) or _solved(e, is_plain=True) or _penalised(e)
    in_the_loss = "" if told else _in_the_loss(e)
    told = told or in_the_loss or _solved(e, is_plain=False)
    if not told:
        differs = e.meant.replay.tolerance.differs
        off = {name: apart for name, apart in e.by_parameter(e.reference).items() if apart > differs}
        told = f"the variables that differ: {', '.join(f'{name} ({apart:.1g})' for name, apart in off.items())}"
    explanation = f"The gradient of update {e.update.number} is not that of the loss that was meant; {told}."
    numbers = [each.update.number for each in differing]
    line = line_of_loss(e.update.pieces[-1].called.line) if in_the_loss else None
    without, proof = max(each.without for each in differing), proved(differing[-1], None)
    return not_known("gradient", explanation, without, line or e.update.applied.line, numbers, proof)


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


def _in_the_loss(e: Evidence) -> str:
    """Return in words the derivative by the outputs that the loop's loss must have, "" if none makes the gradient.

    The gradient of any loss of the outputs is a sum of the outputs' own gradients: if it is one here, the model, the
    tape and the variables are right, whatever the loss.
    """
    if (found := derivative(e)) is None:
        return ""
    solved, should = found
    far = np.argsort(-np.abs(solved - should))[:3]
    shown = ", ".join(f"{solved[i]:.3g} instead of {should[i]:.3g}" for i in far)
    return (
        "the model, the tape and the variables are right, so it is in the loss: its derivative by the outputs is "
        f"{shown}, where they differ most"
    )
