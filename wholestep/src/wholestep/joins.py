"""Terms of all rows together, where the batch is cut: first the outputs of all rows, then the
terms and their derivatives, once; the gradient of each microbatch needs only these.

(In PyTorch known as gradient caching: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", 2021.)
"""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from wholestep.cut import Cut
from wholestep.embeddings.lookups import Lookups
from wholestep.engines import Engine
from wholestep.model import Forward, Slopes, Whole
from wholestep.slices import Gradient, Slices
from wholestep.sums import Folded, SumInputs, Totals
from wholestep.tree import Tensor, Tree

Leaves = dict[str, list[Tensor]]  # by joined term, the leaves of its outputs
Collected = Folded[Leaves, tuple[()], tuple[()]]
# (inputs, data, rows of a microbatch, place of the first) -> the joined terms of a replica's rows
TermsOf = Callable[[SumInputs, Tree, Tensor, Tensor], dict[str, Whole]]
Loss = Callable[[dict[str, tuple[Tensor, Tensor]]], Tensor]


class JoinedTerms(NamedTuple):
    """The joined terms of a batch.

    Args:
        sums: (value, weight) by term.
        slopes: the derivatives of the scaled loss by the outputs.
        grads: the derivatives by the parameters that the terms read, by index.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    slopes: Slopes
    grads: dict[int, Tensor]

    def added_to(self, total: Totals) -> Totals:
        """Return the totals of the microbatches with these terms and gradients."""
        grads: list[Gradient] = list(total.sums.grads)
        for i, grad in self.grads.items():
            before = grads[i]
            if isinstance(before, Slices):
                before = before.dense(grad.shape[0])
            grads[i] = before + ops.cast(grad, before.dtype)
        sums = total.sums._replace(grads=grads, terms=total.sums.terms | self.sums)
        return total._replace(sums=sums)


def no_outputs(
    engine: Engine, cut: Cut, terms_of: TermsOf, inputs: SumInputs, data: Tree
) -> Leaves:
    """Return room for the outputs of all rows of a batch."""

    def leaves(inputs: SumInputs, data: Tree, rows: Tensor) -> Leaves:
        return _stored(terms_of(inputs, data, rows, ops.zeros((), "int32")))

    few = inputs.rows[: cut.sections[0][1]]
    shapes = engine.programs.shapes(leaves, inputs, data, few)
    return {
        label: [ops.zeros((cut.places, *leaf.shape[1:]), leaf.dtype) for leaf in group]
        for label, group in shapes.items()
    }


def with_outputs(room: Leaves, terms: dict[str, Whole], first: Tensor) -> Leaves:
    """Return the outputs with those of a microbatch, whose first row has the place `first`."""

    def put(into: Tensor, leaf: Tensor) -> Tensor:
        return ops.slice_update(into, _start(first, leaf), leaf)

    return {
        label: [put(*pair) for pair in zip(room[label], leaves, strict=True)]
        for label, leaves in _stored(terms).items()
    }


def _stored(terms: dict[str, Whole]) -> Leaves:
    """Return the outputs of terms; replicas add up numbers, so bools are stored as such."""

    def number(leaf: Tensor) -> Tensor:
        return ops.cast(leaf, "int8") if "bool" in str(leaf.dtype) else leaf

    return {label: list(map(number, term.leaves)) for label, term in terms.items()}


def join(
    engine: Engine,
    forward: Forward,
    inputs: SumInputs,
    terms: dict[str, Whole],
    outputs: Leaves,
    loss: Loss,
    lookups: Lookups,
) -> JoinedTerms:
    """Return the joined terms of a batch, and their derivatives.

    Args:
        terms: the terms of any microbatch, for their functions.
        outputs: the outputs of all rows.
        loss: the part of the loss that these terms are, by their sums.
    """
    restored = {
        label: [
            ops.cast(leaf, like.dtype)
            for leaf, like in zip(outputs[label], term.leaves, strict=True)
        ]
        for label, term in terms.items()
    }
    places = [
        (label, i)
        for label, leaves in restored.items()
        for i, leaf in enumerate(leaves)
        if "float" in str(leaf.dtype)
    ]
    params = inputs.values.params
    read: list[int] = []

    def sums_of(leaves: Leaves, params: list) -> dict[str, tuple[Tensor, Tensor]]:
        nonlocal read
        values = inputs.values._replace(params=params)
        whole = {label: term.with_leaves(leaves[label]) for label, term in terms.items()}
        sums, read = forward.joined(values, whole, lookups=lookups)
        return sums

    engine.programs.shapes(sums_of, restored, params)
    learned = list(read)

    def scaled_loss(given: list[Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        leaves = {label: list(group) for label, group in restored.items()}
        for (label, i), value in zip(places, given, strict=False):
            leaves[label][i] = value
        changed = list(params)
        for i, value in zip(learned, given[len(places) :], strict=True):
            changed[i] = value
        sums = sums_of(leaves, changed)
        value = loss(sums)
        return value * ops.cast(inputs.scale, value.dtype), sums

    given = [restored[label][i] for label, i in places] + [params[i] for i in learned]
    grads, sums = engine.ops.differentiate(scaled_loss, given)
    slopes = {
        label: [ops.zeros_like(leaf) for leaf in leaves] for label, leaves in restored.items()
    }
    for (label, i), grad in zip(places, grads, strict=False):
        slopes[label][i] = grad
    return JoinedTerms(sums, slopes, dict(zip(learned, grads[len(places) :], strict=True)))


def slopes_of(slopes: Slopes, first: Tensor, num: int) -> Slopes:
    """Return the slopes of the outputs of `num` rows."""

    def part(leaf: Tensor) -> Tensor:
        return ops.slice(leaf, _start(first, leaf), (num, *leaf.shape[1:]))

    return {label: list(map(part, leaves)) for label, leaves in slopes.items()}


def _start(first: Tensor, leaf: Tensor) -> list[Tensor]:
    return [first, *[ops.zeros_like(first)] * (len(leaf.shape) - 1)]
