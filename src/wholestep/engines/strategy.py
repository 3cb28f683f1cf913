"""Several replicas on TensorFlow, by `tf.distribute.MirroredStrategy`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from wholestep import tree
from wholestep.engines.tensorflow_leaves import joined, rows_of, tensor_of
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor, Tree


class Shares(NamedTuple):
    """Loaded rows, each on the replica that computes on it: leaves of one value for each replica."""

    leaves: Tree


class Replicas:
    """The replicas of a strategy. Each sees its rows alone; their results are summed."""

    def __init__(self, strategy: tf.distribute.Strategy, model: keras.Model):
        self.strategy = strategy
        self.count = strategy.num_replicas_in_sync
        self.syncing = [la for la in model._flatten_layers() if isinstance(la, keras.layers.BatchNormalization)]

    @property
    def index(self) -> int | None:
        """The index of the replica that is being traced; None outside of replicas."""
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self.strategy:
            return None
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def part(self, size: int) -> slice:
        """Return this replica's slice of `size` rows; all rows outside of replicas."""
        if self.index is None:
            return slice(0, size)
        each = -(-size // self.count)
        return slice(min(self.index * each, size), min((self.index + 1) * each, size))

    def put(self, function: Callable[[int], np.ndarray]) -> tf.distribute.DistributedValues:
        """Return one value for each replica, on its device."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensor_of(function(context.replica_id_in_sync_group))
        )

    def gather(self, data: Tree, rows: Tensor) -> Tree:
        """Return the rows of a batch from all replicas, outside of replicas."""
        results = self.strategy.experimental_local_results
        if not isinstance(data, Shares):
            return tree.map_leaves(lambda leaf: rows_of(results(leaf)[0], rows), data)
        each = -(-rows.shape[0] // self.count)
        places = [rows[start : start + each] for start in range(0, rows.shape[0], each)]
        return tree.map_leaves(lambda leaf: joined(list(map(rows_of, results(leaf), places))), data.leaves)

    def total(self, function: Callable, data: Tree, carried: Tree, syncs: bool) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried) -> (sums, carried, alike) on every replica; add up sums and carried changes."""

        def work(data: Tree) -> tuple[Tree, Tree, Tree]:
            sums, after, alike = function(data, carried)
            return sums, tf.nest.map_structure(tf.subtract, after, carried), alike

        with self._synchronized() if syncs else nullcontext():
            sums, moves, alike = self.strategy.run(work, args=(data,))
        sums, moves = tf.nest.map_structure(self._sum, (sums, moves))
        first = tf.nest.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], alike)
        return sums, tf.nest.map_structure(tf.add, carried, moves), first

    def apply(self, optimizer: keras.optimizers.Optimizer, grads: list, variables: list) -> None:
        """Apply an optimizer update with the full batch's gradients, the same on every replica."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        parts = [inner, *getattr(inner, "optimizers", [])]  # a MultiOptimizer has several
        # The gradients are summed already, before clipping. Keras would sum them again, after it.
        for part in parts:
            vars(part)["_all_reduce_sum_gradients"] = list
        try:
            self.strategy.run(lambda *own: optimizer.apply(list(own), variables), args=tuple(grads))
        finally:
            for part in parts:
                del vars(part)["_all_reduce_sum_gradients"]

    def _sum(self, value: tf.distribute.DistributedValues) -> tf.Tensor:
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Make BatchNormalization compute its statistics over all replicas."""
        before = [layer.synchronized for layer in self.syncing]
        for layer in self.syncing:
            layer.synchronized = True
        try:
            yield
        finally:
            for layer, was in zip(self.syncing, before, strict=True):
                layer.synchronized = was


def find_replicas(model: keras.Model | None, replicas: int | str | None) -> Replicas | None:
    """Return the replicas of the strategy that a model was built under; None without a strategy or with one replica.

    Raises:
        SpecificationError: the strategy is of another kind, or has another number of replicas than requested.
    """
    strategy = getattr(model, "distribute_strategy", None)
    count = 1 if strategy is None else strategy.num_replicas_in_sync
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if count > 1 and not mirrored:
        must = "The strategy must mirror variables in one process, as MultiWorkerMirroredStrategy and others do not."
        attempt = "tf.distribute.MirroredStrategy; or, for several hosts, the JAX engine and `wholestep launch`."
        raise SpecificationError(message(must, type(strategy).__name__, attempt))
    if replicas not in (None, count) and not (replicas == "all" and mirrored):
        must = "On TensorFlow, replicas must match the strategy that the model was built under."
        found = f"replicas={replicas} and a model of {count}"
        raise SpecificationError(
            message(must, found, "with tf.distribute.MirroredStrategy().scope(): build the model.")
        )
    return Replicas(strategy, model) if count > 1 else None
