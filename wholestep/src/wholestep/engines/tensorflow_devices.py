"""The devices and replicas on TensorFlow, by `tf.distribute.MirroredStrategy`; leaves of data, text
and ragged rows.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from wholestep import tree
from wholestep.engines.protocol import Alike, Carried, Data, Found, Shares
from wholestep.errors import SpecificationError, message
from wholestep.keras_private import flatten_layers
from wholestep.patches import replaced
from wholestep.safety import is_in_use
from wholestep.tree import Tensor, Tree


class TensorflowReplicas:
    """The part `replicas` of the engine on TensorFlow: each sees its rows alone, and their results
    are summed.

    Args:
        strategy: the strategy that mirrors variables on several devices; None for one device.
        model: the model, whose normalisations couple the rows of all replicas.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy | None = None, model: keras.Model | None = None
    ):
        self.strategy: Any = strategy
        self.count = 1 if strategy is None else strategy.num_replicas_in_sync
        self.is_split = self.can_split = strategy is not None
        layers = [] if strategy is None or model is None else flatten_layers(model)()
        self.coupling_layers: Collection = [
            la for la in layers if isinstance(la, keras.layers.BatchNormalization)
        ]

    @property
    def index(self) -> int | None:
        """The index of the replica that is being traced; None outside of replicas."""
        context = None if self.strategy is None else tf.distribute.get_replica_context()
        if context is None or context.strategy is not self.strategy:
            return None
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def put(self, function: Callable[[int], np.ndarray]) -> tf.distribute.DistributedValues:
        """Return one value for each replica, on its device."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensor_of(function(context.replica_id_in_sync_group))
        )

    def total(
        self,
        function: Callable[[Tree, Carried, Data], tuple[Found, Carried, Alike]],
        data: Tree,
        carried: Carried,
        given: Data,
        *,
        syncs: bool,
    ) -> tuple[Found, Carried, Alike]:
        """Run (data, carried, given) -> (sums, carried, alike) on every replica, and return the
        totals.

        With `syncs`, BatchNormalization computes its statistics over all replicas.
        """
        assert self.strategy is not None

        def work(data: Tree) -> tuple[Tree, Tree, Tree]:
            sums, after, alike = function(data, carried, given)
            return sums, tf.nest.map_structure(tf.subtract, after, carried), alike

        with self._synchronized() if syncs else nullcontext():
            sums, moves, alike = self.strategy.run(work, args=(data,))
        sums, moves = tf.nest.map_structure(self._sum, (sums, moves))
        first = tf.nest.map_structure(
            lambda v: self.strategy.experimental_local_results(v)[0], alike
        )
        return sums, tf.nest.map_structure(tf.add, carried, moves), first

    def batch(self, data: Tree, rows: Tensor) -> Any:
        """Return the rows of a (micro)batch, and to a replica its part; of `Shares`, `rows` index
        the shares.
        """
        if self.strategy is None:
            return gather(data, rows)
        if self.index is not None:
            return gather(data.leaves if isinstance(data, Shares) else data, self.part(rows)[0])
        results = self.strategy.experimental_local_results
        if not isinstance(data, Shares):
            return tree.map_leaves(lambda leaf: rows_of(results(leaf)[0], rows), data)
        each = -(-rows.shape[0] // self.count)
        places = [rows[start : start + each] for start in range(0, rows.shape[0], each)]
        return tree.map_leaves(
            lambda leaf: joined(list(map(rows_of, results(leaf), places))), data.leaves
        )

    def part(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return the part of a vector over a (micro)batch that belongs to the rows that `batch`
        returns, its start.
        """
        if self.index is None:
            return rows, 0
        size = rows.shape[0]
        each = -(-rows.shape[0] // self.count)
        start = min(self.index * each, size)
        return rows[start : start + each], start

    def apply(self, optimizer: keras.optimizers.Optimizer, grads: list, variables: list) -> None:
        """Apply an optimizer update with the full batch's gradients, the same on every replica."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        parts = [inner, *getattr(inner, "optimizers", [])]  # a MultiOptimizer has several
        # The gradients are summed already, before clipping. Keras would sum them again, after it.
        with replaced(*parts, _all_reduce_sum_gradients=list):
            self.strategy.run(lambda *own: optimizer.apply(list(own), variables), args=tuple(grads))

    def _sum(self, value: tf.distribute.DistributedValues) -> tf.Tensor:
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def _synchronized(self) -> AbstractContextManager[None]:
        """Context in which BatchNormalization computes its statistics over all replicas."""
        return replaced(*self.coupling_layers, synchronized=True)


class TensorflowDevices:
    """The part `devices` of the engine on TensorFlow."""

    def __init__(self, replicas: TensorflowReplicas):
        self.num_replicas = replicas.count
        self.local_replicas = list(range(self.num_replicas))
        self._put = replicas.put if replicas.is_split else None

    def memory(self) -> int | None:
        """Return None: the device's memory is not known."""
        return None

    def place(self, data: Data) -> Data:
        """Put host arrays on the device immediately."""
        return tree.map_leaves(tensor_of, data)

    def resident(self, data: Data) -> tuple[Data, Callable[[], None]]:
        """Put host arrays on the device; with several devices, on each."""
        copies = tree.Copies()
        if (put := self._put) is None:
            return tree.map_leaves(partial(tensor_of, copy=copies.copy), data), copies.wait
        return tree.map_leaves(lambda leaf: put(lambda _: leaf), data), copies.wait

    def stage(self, data: Tree, shares: np.ndarray | None = None) -> Tree:
        """Return host arrays as a program takes them fastest: on the device, to each replica its
        share.
        """
        if shares is None or (put := self._put) is None:
            return tree.map_leaves(partial(tensor_of, shares_memory=True), data)
        return Shares(tree.map_leaves(lambda leaf: put(lambda i: leaf[shares[i]]), data))

    def fetch(self, values: Tree) -> Any:
        """Return device values as numpy. Waits for the device."""
        return (
            array_of(values) if isinstance(values, tf.Tensor) else tree.map_leaves(array_of, values)
        )

    def is_ready(self, values: Tree) -> bool:
        """Whether the values can be fetched without waiting: on a CPU, where calls return after the
        computation.
        """
        flat = tf.nest.flatten(values, expand_composites=True)
        return all("CPU" in leaf.device for leaf in flat if leaf is not None)


def find_replicas(model: keras.Model | None, replicas: int | str | None) -> TensorflowReplicas:
    """Return the replicas of the strategy that a model was built under; one without a strategy.

    Raises:
        SpecificationError: the strategy is of another kind, or has another number of replicas than
            requested.
    """
    strategy = getattr(model, "distribute_strategy", None)
    count = 1 if strategy is None else strategy.num_replicas_in_sync
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if count > 1 and not mirrored:
        must = (
            "The strategy must mirror variables in one process, as MultiWorkerMirroredStrategy "
            "and others do not."
        )
        attempt = (
            "tf.distribute.MirroredStrategy; or, for several hosts, the JAX engine and "
            "`wholestep launch`."
        )
        raise SpecificationError(message(must, type(strategy).__name__, attempt))
    if replicas not in (None, count) and not (replicas == "all" and mirrored):
        must = "On TensorFlow, replicas must match the strategy that the model was built under."
        found = f"replicas={replicas} and a model of {count}"
        raise SpecificationError(
            message(must, found, "with tf.distribute.MirroredStrategy().scope(): build the model.")
        )
    return TensorflowReplicas(strategy, model) if count > 1 else TensorflowReplicas()


# ---- leaves of data ----


def make_deterministic() -> bool:
    """Let operations on a GPU repeat to the bit; False if programs may be compiled already."""
    if is_in_use():
        return False
    tf.config.experimental.enable_op_determinism()
    return True


def tensor_of(
    leaf: Tensor,
    *,
    shares_memory: bool = False,
    copy: Callable[[np.ndarray], np.ndarray] = tree.aligned_copy,
) -> Tensor:
    """Return a host array as a tensor, ragged rows as a `tf.RaggedTensor`; a tensor unchanged.

    Args:
        shares_memory: whether the tensor may share the memory of the array, which then never
            changes.
        copy: copies an array whose memory the tensor then shares.

    >>> tensor_of(tree.ragged(np.array([5, 6, 7]), [0, 2, 3]))
    <tf.RaggedTensor [[5, 6], [7]]>
    """
    if not tree.is_ragged(leaf):
        if isinstance(leaf, np.ndarray):
            return _on_host(leaf, shares_memory, copy) if _can_share(leaf) else tf.constant(leaf)
        return leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf)
    lengths = [len(row) for row in leaf]
    return tf.RaggedTensor.from_row_lengths(
        tensor_of(np.concatenate(leaf)), lengths, validate=False
    )


def _can_share(leaf: np.ndarray) -> bool:
    """Whether a tensor is made faster in the memory of an array. With a GPU, it belongs there."""
    is_plain = leaf.dtype.kind in "iuf" and leaf.dtype.isnative and leaf.size > 0
    return is_plain and tf.executing_eagerly() and not tf.config.list_logical_devices("GPU")


def _on_host(
    leaf: np.ndarray, shares_memory: bool, copy: Callable[[np.ndarray], np.ndarray]
) -> tf.Tensor:
    """Return a tensor in the memory of an aligned array, or of a copy: a tenth of the time of
    `tf.constant`.
    """
    if (
        not shares_memory
        or tree.address(leaf) % 64
        or not (leaf.flags.c_contiguous and leaf.flags.writeable)
    ):
        leaf = copy(leaf)
    return tf.experimental.dlpack.from_dlpack(leaf.__dlpack__())


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


def _spec_of(value: Tensor | None) -> tf.TypeSpec | None:
    """Return the shape and dtype of an argument of a program."""
    if value is None:
        return None
    if isinstance(value, tf.distribute.DistributedValues | tf.RaggedTensor):
        return value._type_spec
    return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))


def gather(data: Data, rows: Tensor) -> Data:
    """Return these rows of every leaf; row numbers are in range."""
    return tree.map_leaves(lambda leaf: rows_of(leaf, rows), data)


def specs_of(arguments: Tree) -> Any:
    """Return the shapes and dtypes of a program's arguments."""
    return tf.nest.map_structure(_spec_of, arguments)
