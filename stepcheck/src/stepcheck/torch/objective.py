"""A function of a module and a batch, as an objective of terms."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from stepcheck.objective import Objective
from stepcheck.torch.losses import ByRow, by_row, times
from stepcheck.trace.cuts import steps
from stepcheck.trace.log import Called, Log


@dataclass
class OfModel:
    """A stated function of a module and a batch.

    Attributes:
        is_coupled: whether a term is one number for a whole batch, as its first batch
            shows.
        is_given: whether data are not stated: a batch has all tensors that the module
            was given.
        modules: other modules, whose values the passes have.
    """

    given: Objective
    is_coupled: bool = False
    is_given: bool = False
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def loss(self) -> "OfModel":
        """The loss, which is this objective."""
        return self

    def of(self, model: nn.Module, inputs: list[Tensor], rest: tuple) -> ByRow:
        """Return the loss of a batch by term and row.

        A number of the whole batch is the value of its first row, with the weight 1.

        Args:
            inputs: of the calls of the module.
            rest: the other parts of the data.

        >>> given = Objective(lambda model, batch: {"fit": model(*batch)[:, 0], "size": 2.0})
        >>> loss = OfModel(given, is_given=True)
        >>> loss.of(nn.Identity(), [torch.ones(3, 1)], ()).weights.tolist()
        [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
        """
        num = len(inputs[0])
        batch = tuple(inputs)
        if not self.is_given:
            x = inputs[0] if len(inputs) == 1 else batch
            batch = x, *map(torch.as_tensor, rest)
        found = self.given.function(model, batch)
        named = found if isinstance(found, dict) else {"loss": found}
        terms = []
        for term in named.values():
            values, weights = (
                term if isinstance(term, tuple | list) else (term, 1.0)
            )
            values = torch.as_tensor(values)
            if not values.ndim:
                self.is_coupled = True
                weights = torch.arange(num) == 0
                values = values.expand(num)
            terms.append(by_row(*times(values, weights)))
        values = torch.cat([term.values for term in terms])
        weights = torch.cat([term.weights for term in terms])
        if values.shape[1] != num:
            raise ValueError(f"each term must have the {num} rows of the batch")
        own = [
            p for module in (model, *self.modules) for p in module.parameters()
        ]
        _must_know(values, {id(value) for value in [*own, *inputs]})
        return ByRow(values, weights, names=tuple(map(str, named)))


def _must_know(values: Tensor, known: set[int]) -> None:
    """Refuse a loss of other tensors that are trained: their values in the loop are not
    known.
    """
    nodes, seen = [values.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                "the function reads a trained tensor that is in no module"
            )
        nodes += [each for each, _ in node.next_functions]


def joined(log: Log, calls: int) -> list[Called]:
    """Return the passes of a log; each `calls` of them with a gradient, of one step,
    are one.
    """
    if calls == 1:
        return log.called
    ones: dict[int, Called] = {}
    parts: set[int] = set()
    for step in steps(log):
        own = [
            called
            for called in step.called
            if called.differentiated is not False
        ]
        for start in range(0, len(own) - calls + 1, calls):
            group = own[start : start + calls]
            ones[group[0].order] = _one(group)
            parts |= {called.order for called in group[1:]}
    left = (each for each in log.called if each.order not in parts)
    return [ones.get(each.order, each) for each in left]


def _one(group: list[Called]) -> Called:
    """Return the passes of a group as one pass, with the inputs and outputs of all."""
    first, last = group[0], group[-1]
    setting = replace(
        first.setting, parts=tuple(group), beside=last.setting.beside
    )
    return replace(
        first,
        inputs=[leaf for called in group for leaf in called.inputs],
        outputs=[leaf for called in group for leaf in called.outputs],
        line=last.line,
        setting=setting,
    )
