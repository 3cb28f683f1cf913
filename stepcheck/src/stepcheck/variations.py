"""The changed values of a batch, and the checks of the arguments that state them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stepcheck.batches import Batch, equal, numbers
from stepcheck.errors import SpecificationError, message

Values = Mapping[str, np.ndarray]


class Plan:
    """The changed values of a batch, by leaf.

    Attributes:
        pads, weights: as stated; `pads` by leaf.
        of_weights: the leaves that hold the weights.
        content: the leaves with values, and no mask or weights.
        padded: the leaves whose padded values are changed.
    """

    def __init__(self, rows: Batch, padding: Any, weights: Any):
        pads, is_stated = _padding(rows, padding)
        weights = _row_weights(rows, weights)
        self.rows, self.pads, self.weights = rows, pads, weights
        self.draw = np.random.default_rng(0)
        masks = [*pads.values()] + ([] if weights is None else [weights == 0])
        of_mask = {
            n
            for n, v in rows.values.items()
            if any(_is_mask(v, each) for each in masks)
        }
        self.of_weights = [
            name
            for name, values in rows.values.items()
            if weights is not None and np.array_equal(values, weights)
        ]
        told = {*of_mask, *self.of_weights}
        self.content = [name for name in rows.values if name not in told] or [
            *rows.values
        ]
        self.padded = [name for name in pads if is_stated or name in self.content]
        self._has_mask, self._is_stated = bool(of_mask), is_stated

    def orders(self) -> Iterator[Values]:
        """Yield the batch with its rows in reverse, and in an order that is drawn."""
        num = self.rows.num_rows
        for index in (np.arange(num)[::-1], self.draw.permutation(num)):
            yield {name: values[index] for name, values in self.rows.values.items()}

    def other_rows(self, name: str, *, first_alone: bool) -> Values | None:
        """Return a leaf with other values in its real places: of the first row, or of
        all.
        """
        values = self.rows.values[name]
        left = [
            np.zeros(len(values), bool),
            *([self.pads[name]] if name in self.pads else []),
        ]
        if self.weights is not None:
            left.append(fitted(self.weights == 0, values))
        num_axes = max(each.ndim for each in left)
        filled = [
            each.reshape(each.shape + (1,) * (num_axes - each.ndim)) for each in left
        ]
        real = ~np.any(np.broadcast_arrays(*filled), axis=0)
        where = real.copy()
        if first_alone:
            where[np.argmax(real.reshape(len(real), -1).any(axis=1)) + 1 :] = False
        return self.rows.others(name, where, real, self.draw)

    def marks(self, name: str) -> tuple[str, ...]:
        """Return the value by which an update may know the padding of a leaf, and its
        name.
        """
        values, mask = self.rows.values[name], self.pads[name]
        padded = values[mask]
        is_one = np.all(equal(padded, padded[0])) and not np.any(
            equal(values[~mask], padded[0])
        )
        is_known_by_mask = self._has_mask and values.dtype.kind == "f"
        if self._is_stated or is_known_by_mask or not is_one:
            return ()
        return str(padded.flat[0]), name


def _padding(rows: Batch, padding: Any) -> tuple[dict[str, np.ndarray], bool]:
    """Return the masks of the padding by leaf, and whether the leaves are stated."""
    stated = padding(rows.tree) if callable(padding) else padding
    if stated is None:
        return {}, False
    if not hasattr(stated, "keys"):
        mask = _mask("padding", stated)
        found = {
            n: mask
            for n, v in rows.values.items()
            if v.shape[: mask.ndim] == mask.shape
        }
        if found:
            return found, False
        must = (
            "padding must have the first axes of an array of the batch: (rows, places)."
        )
        raise SpecificationError(message(must, mask, "batch['ids'] == 0."))
    masks = {name: _mask(f"padding[{name!r}]", mask) for name, mask in stated.items()}
    for name, mask in masks.items():
        if (
            name not in rows.values
            or rows.values[name].shape[: mask.ndim] != mask.shape
        ):
            known = ", ".join(f"{n} {v.shape}" for n, v in rows.values.items())
            must = f"padding[{name!r}] must have the first axes of an array of the batch ({known})."
            raise SpecificationError(
                message(must, mask, "padding={'ids': batch['ids'] == 0}.")
            )
    return masks, True


def _mask(name: str, given: Any) -> np.ndarray:
    mask = numbers(name, given)
    must = f"{name} must be of booleans, True where padding, and neither all True nor all False."
    if mask.dtype != bool or mask.all() or not mask.any():
        raise SpecificationError(message(must, given, "batch['attention_mask'] == 0."))
    return mask


def _row_weights(rows: Batch, weights: Any) -> np.ndarray | None:
    """Return the weights of rows, or of places."""
    stated = weights(rows.tree) if callable(weights) else weights
    if stated is None:
        return None
    values = numbers("weights", stated)
    if values.ndim == 0 or len(values) != rows.num_rows or not np.any(values):
        must = (
            f"weights must have one number for each of the {rows.num_rows} rows, not "
            "all of them 0."
        )
        raise SpecificationError(message(must, values, "batch['weights']."))
    is_of_batch = any(np.array_equal(values, each) for each in rows.values.values())
    if not is_of_batch and np.all(values != 0):
        must = (
            "weights must have a 0, or be an array of the batch, in which a row can "
            "get weight 0."
        )
        raise SpecificationError(
            message(must, values, "weights=lambda batch: batch['weights'].")
        )
    return values


def numbers_of_cuts(cuts: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of microbatches to try; the update with the first is expected.

    >>> numbers_of_cuts(4), numbers_of_cuts([2, 3])
    ((1, 4), (2, 3))

    Raises:
        SpecificationError: they are not numbers, or only one.
    """
    if cuts is None:
        return ()
    numbers_of = (1, cuts) if isinstance(cuts, int) else tuple(cuts)
    are_valid = all(isinstance(each, int) and each > 0 for each in numbers_of)
    if not are_valid or len({*numbers_of}) < 2 or len({*numbers_of}) < len(numbers_of):
        must = "cuts must be different numbers of microbatches, at least two."
        raise SpecificationError(message(must, cuts, "cuts=(1, 2, 4)."))
    return numbers_of


def fitted(is_left: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return which places, or which rows, of an array are left out."""
    if values.shape[: is_left.ndim] == is_left.shape:
        return is_left
    return np.asarray(is_left.reshape(len(is_left), -1).all(axis=1))


def _is_mask(values: np.ndarray, mask: np.ndarray) -> bool:
    """Whether an array has one value where the mask is True, and another one elsewhere."""
    if values.shape != mask.shape or not mask.any() or mask.all():
        return False
    inside, outside = values[mask], values[~mask]
    return bool(
        np.all(inside == inside[0])
        and np.all(outside == outside[0])
        and inside[0] != outside[0]
    )
