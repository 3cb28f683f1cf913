"""Names of causes, by the factors of the rows and of the model's own losses."""

import numpy as np

from wholestep.audit.basis import Basis

_SAME = 2e-3  # factors of rows
_REST = "microbatches of the last pass"
_LEAST_SCALE = 24.0  # a factor that no count of a small loop is: loss scales are larger


def of_rows(bases: list[Basis], counted: list[np.ndarray], *, is_of_last: bool = False) -> tuple[str, ...]:
    """Return the causes by which the rows of these updates count so, the likeliest first.

    Args:
        is_of_last: whether the rows of the pass before the last are left out of every update.
    """
    tables = [_known(basis, bases, is_of_last) for basis in bases]
    used = [basis.counts["the row's own weight"] > 0 for basis in bases]
    if is_of_last:
        rests = [basis.sets[f"the {_REST}"] for basis in bases]
        if all(map(np.all, rests)) or any(np.any(own[~rest]) for own, rest in zip(counted, rests, strict=True)):
            return ()
        used = [own & rest for own, rest in zip(used, rests, strict=True)]

    def is_so(name: str, way: int) -> bool:
        return all(
            np.allclose(own[rows], table[name][way][rows], rtol=_SAME, atol=0)
            for own, table, rows in zip(counted, tables, used, strict=True)
        )

    return tuple(n for n, ways in tables[0].items() if any(is_so(n, i) for i in range(len(ways))))


def _known(basis: Basis, bases: list[Basis], is_of_last: bool) -> dict[str, list[np.ndarray]]:
    """Return what each row counts by each cause that may be here: one array for each way to write it."""
    counts, sets = basis.counts, basis.sets
    whole, own = counts["the weight of the update"], counts["the weight of the own microbatch"]
    num, full = counts["the number of microbatches"], counts["the weight of a full batch"]
    last, first, rest = (sets[f"the {n}"].astype(float) for n in ("last microbatch", "first microbatch", _REST))
    weight = counts["the row's own weight"]
    if is_of_last:
        whole = np.full_like(whole, (weight * rest).sum())
        num = np.full_like(num, rest[basis.starts].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "mean of means": [1 / (own * num)],
            "padding counted": [1 / (whole + sum(basis.e.pads))],
            "divided by a full window": [1 / (own * counts["the microbatches of a full window"])],
            "divided by the full batch": [1 / full],
            "never divided": [np.ones_like(whole)],
            "mean of row means": [1 / (counts["the rows with a weight"] * weight)],
            "divided by the rows": [1 / counts["its rows"]],
            "ascent": [-1 / whole],
        }
        if any(len(each.sizes) > each.e.num_replicas for each in bases):
            found |= {
                "summed over microbatches": [1 / own],
                "divided twice": [1 / (whole * num)],
                "only the last microbatch": [last / own, last / (own * num), last / whole],
                "only the first microbatch": [first / own, first / whole],
                "first microbatch lost": [(1 - first) / (own * num), (1 - first) / whole],
                "last microbatch lost": [(1 - last) / (own * num), (1 - last) / whole],
            }
        if any(each.e.num_replicas > 1 for each in bases):
            found["summed over replicas"] = [1 / counts["the weight of the own replica"]]
            found["divided by the replicas twice"] = [1 / (whole * counts["the number of replicas"])]
        if not all(each.sets[f"the {_REST}"].all() for each in bases):
            found["last window dropped"] = [rest / (weight * rest).sum(), rest / full]
        if basis.e.meant.replay.data[2] is not None:
            found["divided by the weights"] = [1 / counts["the sum of the sample weights"]]
        if counts["its places"][0]:
            found["padded places counted"] = [1 / counts["its places"]]
    return found


def of_scale(bases: list[Basis], factors: np.ndarray) -> tuple[str, ...]:
    """Return the cause of a factor on all of a gradient in half precision."""
    middle, meant = float(np.median(factors)), bases[0].e.meant
    if not meant.replay.is_half or middle <= 0:
        return ()
    if middle >= _LEAST_SCALE:
        return ("loss scale left in",)
    if middle <= 1 / _LEAST_SCALE:
        return ("loss not scaled",)
    power = np.log2(middle)
    return ("loss scale frozen in a trace",) * bool(meant.is_scaled and abs(power - np.round(power)) < 0.05)


def of_penalty(bases: list[Basis], counted: np.ndarray) -> tuple[str, ...]:
    """Return the causes by which the model's own losses count so."""
    own = [(basis, number) for basis, number in zip(bases, counted, strict=True) if basis.has_penalty]
    replicas = max(basis.e.num_replicas for basis in bases)
    ways = {
        "penalty forgotten": lambda basis: 0.0,
        "penalty once per replica": lambda basis: float(basis.e.num_replicas if replicas > 1 else 1),
        "penalty once per microbatch": lambda basis: float(len(basis.sizes) if replicas == 1 else 1),
        "penalty added twice": lambda basis: 2.0,
        "penalty divided": lambda basis: 1 / (len(basis.sizes) if replicas == 1 else 1),
    }
    return tuple(
        name
        for name, way in ways.items()
        if all(abs(way(basis) - number) < 1e-2 for basis, number in own) and any(way(basis) != 1 for basis, _ in own)
    )
