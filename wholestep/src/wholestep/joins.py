"""Terms of all rows together, where the batch is cut: first the outputs of all rows, then the
terms and their derivatives, once; the gradient of each microbatch needs only these.

(In PyTorch known as gradient caching: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", 2021.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras import ops

from wholestep.cut import Cut
from wholestep.embeddings.lookups import Lookups
from wholestep.engines import Engine
from wholestep.model import Forward, Whole, leaves_of, with_leaves
from wholestep.slices import Gradient, Slices
from wholestep.sums import Folded, SumInputs, Totals
from wholestep.tree import Tensor, Tree

Terms = dict[str, Whole]
TermSums = dict[str, tuple[Tensor, Tensor]]
Collected = Folded[list[Tensor], tuple[()], tuple[()]]  # the outputs of all terms
# (inputs, data, rows of a microbatch, place of the first) -> the joined terms of a replica's rows
TermsOf = Callable[[SumInputs, Tree, Tensor, Tensor], Terms]


class JoinedTerms(NamedTuple):
    """The joined terms of a batch.

    Args:
        sums: (value, weight) by term.
        slopes: the derivative of the scaled loss by each output.
        grads: the derivatives by the parameters that the terms read, by index.
    """

    sums: TermSums
    slopes: list[Tensor]
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
) -> list[Tensor]:
    """Return room for the outputs of all rows of a batch."""

    def outputs(inputs: SumInputs, data: Tree, rows: Tensor) -> list[Tensor]:
        return _stored(terms_of(inputs, data, rows, ops.zeros((), "int32")))

    few = inputs.rows[: cut.sections[0][1]]
    shapes = engine.programs.shapes(outputs, inputs, data, few)
    return [ops.zeros((cut.places, *leaf.shape[1:]), leaf.dtype) for leaf in shapes]


def with_outputs(room: list[Tensor], terms: Terms, first: Tensor) -> list[Tensor]:
    """Return the outputs with those of a microbatch, whose first row has the place `first`."""
    pairs = zip(room, _stored(terms), strict=True)
    return [ops.slice_update(into, _start(first, leaf), leaf) for into, leaf in pairs]


def _stored(terms: Terms) -> list[Tensor]:
    """Return the outputs of terms; replicas add up numbers, so bools are stored as such."""
    leaves = leaves_of(terms)
    return [ops.cast(leaf, "int8") if "bool" in str(leaf.dtype) else leaf for leaf in leaves]


def join(
    engine: Engine,
    forward: Forward,
    inputs: SumInputs,
    terms: Terms,
    outputs: list[Tensor],
    loss: Callable[[TermSums], Tensor],
    lookups: Lookups,
) -> JoinedTerms:
    """Return the joined terms of a batch, and their derivatives.

    Args:
        terms: the terms of any microbatch, for their functions.
        outputs: the outputs of all rows.
        loss: the part of the loss that these terms are, by their sums.
    """
    params = inputs.values.params
    pairs = zip(outputs, leaves_of(terms), strict=True)
    leaves = [ops.cast(leaf, like.dtype) for leaf, like in pairs]
    floats = [i for i, leaf in enumerate(leaves) if "float" in str(leaf.dtype)]
    read: list[int] = []

    def sums_of(leaves: list[Tensor], params: list) -> TermSums:
        nonlocal read
        values = inputs.values._replace(params=params)
        sums, read = forward.joined(values, with_leaves(terms, leaves), lookups=lookups)
        return sums

    engine.programs.shapes(sums_of, leaves, params)
    learned = list(read)
    num = len(floats)

    def scaled_loss(given: list[Tensor]) -> tuple[Tensor, TermSums]:
        sums = sums_of(_put(leaves, floats, given[:num]), _put(params, learned, given[num:]))
        value = loss(sums)
        return value * ops.cast(inputs.scale, value.dtype), sums

    given = [*(leaves[i] for i in floats), *(params[i] for i in learned)]
    grads, sums = engine.ops.differentiate(scaled_loss, given)
    slopes = _put([ops.zeros_like(leaf) for leaf in leaves], floats, grads[:num])
    return JoinedTerms(sums, slopes, dict(zip(learned, grads[num:], strict=True)))


def _put(values: list, places: list[int], others: list) -> list:
    """Return the values with others at these places."""
    changed = list(values)
    for i, value in zip(places, others, strict=True):
        changed[i] = value
    return changed


def slopes_of(slopes: Sequence[Tensor], first: Tensor, num: int) -> list[Tensor]:
    """Return the slopes of the outputs of `num` rows."""
    return [ops.slice(leaf, _start(first, leaf), (num, *leaf.shape[1:])) for leaf in slopes]


def _start(first: Tensor, leaf: Tensor) -> list[Tensor]:
    return [first, *[ops.zeros_like(first)] * (len(leaf.shape) - 1)]
