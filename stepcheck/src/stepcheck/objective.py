"""An intention that is no loss of outputs and labels: a function of the model and a
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Objective:
    """The loss that is meant, as a function of (model, batch): for `loss=` of
    `stepcheck.watch`.

    For a variational autoencoder, a student with a teacher, a policy, a contrastive
    loss, the parts of a GAN. The function is called after the loop, with a copy of the
    model that has the weights, the mode and the random state of a forward pass that the
    loop made. Other models that it calls have the weights that they had then. Other
    values that it reads must not move in the loop.

    Args:
        function: gets the model, and the tuple of the parts of `data` with the rows of
            the pass, or, without `data`, of the tensors that the model was given. It
            returns `{name: (values, weights)}`, with values of shape (rows, ...) and
            weights of the same shape or its leading part: a term is sum(values *
            weights) / sum(weights) over all rows of the update, and the loss is the sum
            of its terms. Weights are 1 in `{name: values}`, or values alone. A value
            without an axis is a loss of the whole batch, which is compared as a whole.
        calls: how often the function calls the model with a gradient. So many forward
            passes of the loop are one, with the inputs of all: `data=((a, b), y)`.

    >>> import stepcheck
    >>> def contrast(model, batch):
    ...     (a, b), is_same = batch
    ...     apart = ((model(a) - model(b)) ** 2).sum(1)
    ...     return {"pull": (apart, is_same), "push": (1 / (1 + apart), 1 - is_same)}
    >>> stepcheck.Objective(contrast, calls=2).calls
    2
    """

    function: Callable[[Any, tuple[Any, ...]], Any]
    calls: int = 1
