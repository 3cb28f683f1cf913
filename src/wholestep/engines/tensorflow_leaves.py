"""Leaves of data on TensorFlow: numbers, text and ragged rows, and back."""

import numpy as np
import tensorflow as tf

from wholestep import tree
from wholestep.tree import Tensor, Tree


def tensor_of(leaf: Tensor) -> Tensor:
    """Return a host array as a tensor, ragged rows as a `tf.RaggedTensor`; a tensor unchanged.

    >>> tensor_of(tree.ragged(np.array([5, 6, 7]), [0, 2, 3]))
    <tf.RaggedTensor [[5, 6], [7]]>
    """
    if not tree.is_ragged(leaf):
        return leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf)
    lengths = [len(row) for row in leaf]
    return tf.RaggedTensor.from_row_lengths(tensor_of(np.concatenate(leaf)), lengths, validate=False)


def array_of(value: Tensor) -> np.ndarray:
    """Return a tensor's content on the host. Waits for it."""
    if isinstance(value, tf.RaggedTensor):
        return tree.ragged(array_of(value.values), np.asarray(value.row_splits))
    return np.asarray(value)


def rows_of(leaf: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of a leaf; their number is static where the length of `rows` is."""
    return _of_rows(tf.gather(leaf, rows), rows.shape[0] if rows.shape.rank else None)


def joined(parts: list[Tensor]) -> Tensor:
    """Return the rows of all parts; their number is static where each part's number is."""
    numbers = [part.shape[0] for part in parts]
    return _of_rows(tf.concat(parts, axis=0), None if None in numbers else sum(numbers))


def _of_rows(leaf: Tensor, number: int | None) -> Tensor:
    """Return a leaf with its static number of rows, which TensorFlow drops from ragged tensors."""
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    splits = tf.ensure_shape(leaf.row_splits, [None if number is None else number + 1])
    return tf.RaggedTensor.from_row_splits(leaf.values, splits, validate=False)


def spec_of(value: Tensor | None) -> tf.TypeSpec | None:
    """Return the shape and dtype of an argument of a program."""
    if value is None:
        return None
    if isinstance(value, tf.distribute.DistributedValues | tf.RaggedTensor):
        return value._type_spec
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))


def why_not_for_xla(specs: Tree) -> str:
    """Return why XLA cannot hold arguments of such shapes and dtypes; "" if it can."""
    leaves = [spec for spec in tf.nest.flatten(specs) if spec is not None]
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in leaves):
        return "it takes ragged rows, whose lengths are not static"
    if any(getattr(spec, "dtype", None) == tf.string for spec in leaves):
        return "it takes text, which XLA does not support"
    return ""
