"""Notes on a model's outputs by themselves: probabilities along the wrong axis, one number in every row."""

import numpy as np

from wholestep.audit.found import Likely

ENOUGH = 16  # numbers: all of fewer logits may lie between 0 and 1


def are_shares(out: np.ndarray) -> bool:
    """Whether the numbers of each place are probabilities."""
    return bool(out.min() >= 0 and np.allclose(out.sum(-1), 1, atol=1e-3))


def across(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if the outputs are probabilities over the rows of each batch, and not over the classes.

    >>> across([np.array([[0.9, 0.2], [0.1, 0.8]])] * 8)[0][:59]
    'The outputs of each class add up to 1 over the rows of a ba'
    """
    whole = [out for out in outputs if out.ndim == 2 and min(out.shape) > 1]
    many = [np.exp(out) if out.max() <= 0 else out for out in whole]
    if sum(map(np.size, many)) < ENOUGH or not all(are_shares(out.T) and not are_shares(out) for out in many):
        return []
    told = "The outputs of each class add up to 1 over the rows of a batch, and those of a row do not: the softmax is "
    return [Likely(f"{told}taken along the wrong axis. `axis=-1` is meant.")]


def constant(outputs: list[np.ndarray]) -> list[str]:
    """Return a note if all outputs are one number, in every row.

    >>> constant([np.ones((4, 1))] * 4)
    ['All outputs are 1, in every row of every update: is it a softmax of a single number? That takes a sigmoid.']
    """
    many = np.concatenate([np.ravel(out) for out in outputs] or [np.zeros(0)])
    if many.size < ENOUGH or np.any(many != many[0]):
        return []
    told = "is it a softmax of a single number? That takes a sigmoid." if many[0] == 1 else "do they see the inputs?"
    return [Likely(f"All outputs are {many[0]:g}, in every row of every update: {told}")]
