"""The placement of arrays on several JAX devices: batches over replicas, variables by their layouts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wholestep.checkpoints import Numbers
from wholestep.errors import SpecificationError, message
from wholestep.tree import Tensor, Tree


class Shares(NamedTuple):
    """Loaded rows, each on the replica that computes on it: leaves (replicas, rows of a replica, ...)."""

    leaves: Tree


class MeshLayout:
    """A mesh of devices, one axis of which is the replicas.

    Args:
        mesh: the devices.
        axis: the axis over which the rows of a batch are spread.
        distribution: the `keras.distribution` that places variables; None if every device holds all of them.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        distribution: keras.distribution.DataParallel | keras.distribution.ModelParallel | None = None,
    ):
        self.mesh = mesh
        self.axis = axis
        self.distribution = distribution
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec(axis))
        self.is_inside = False  # whether the part of one replica is being traced

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share the rows of a batch."""
        return self.mesh.shape[self.axis]

    def of(self, variable: keras.Variable) -> NamedSharding:
        """Return the sharding of a variable's value."""
        if self.distribution is None:
            return self.everywhere
        layout = self.distribution.get_variable_layout(variable)
        return getattr(layout, "backend_layout", layout)

    def put(self, value: Tensor, sharding: NamedSharding) -> jax.Array:
        """Return a value with this sharding; the value itself if it has the sharding already."""
        if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if self.is_local:
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def spread(self, leaf: np.ndarray, shares: np.ndarray) -> jax.Array:
        """Place each replica's share of the rows; `shares` are row indices, int (replicas, rows of a replica)."""
        shape = (*shares.shape, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, self.rows, lambda index: leaf[shares[index[0]]])

    def total(self, function: Callable, data: Tree, carried: Tree, given: Tree) -> tuple[Tree, Tree, Tree]:
        """Run (data, carried, given) -> (sums, carried, alike) on every replica; add up sums and carried changes.

        The function must not close over an array: arrays are global outside, and local to each replica inside.
        """

        def work(data: Tree, carried: Tree, given: Tree) -> tuple[Tree, Tree, Tree]:
            if isinstance(data, Shares):
                data = Shares(jax.tree.map(lambda leaf: leaf[0], data.leaves))
            self.is_inside = True
            try:
                sums, after, alike = function(data, carried, given)
            finally:
                self.is_inside = False
            moves = jax.tree.map(jnp.subtract, after, carried)
            sums, moves = jax.lax.psum((sums, moves), self.axis)
            return sums, jax.tree.map(jnp.add, carried, moves), alike

        everywhere = PartitionSpec()
        of_data = PartitionSpec(self.axis) if isinstance(data, Shares) else everywhere
        options: dict[str, Any] = {"axis_names": {self.axis}, "check_vma": False}
        specs = {"in_specs": (of_data, everywhere, everywhere), "out_specs": everywhere}
        return jax.shard_map(work, mesh=self.mesh, **specs, **options)(data, carried, given)

    @property
    def own_replicas(self) -> list[int]:
        """The replicas with a device in this process."""
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0)
        return [
            i
            for i, several in enumerate(devices)
            if any(d.process_index == jax.process_index() for d in np.ravel(several))
        ]

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return jax.process_count() == 1


def find_layout(replicas: int | str | None) -> MeshLayout | None:
    """Return the layout set by `keras.distribution` or `replicas`; None for one device.

    Raises:
        SpecificationError: the two contradict each other, or there are too few devices.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        layout = MeshLayout(distribution.device_mesh.backend_mesh, distribution.batch_dim_name, distribution)
        if replicas not in (None, "all", layout.num_replicas):
            must = "replicas must be left out under keras.distribution, which sets them."
            raise SpecificationError(message(must, f"replicas={replicas} and {distribution}", "leave one of them out."))
        return layout
    devices = jax.devices()
    if replicas is None and jax.process_count() == 1:
        return None
    num = len(devices) if replicas in (None, "all") else int(replicas)
    if num > len(devices):
        attempt = f'replicas="all", or XLA_FLAGS=--xla_force_host_platform_device_count={num} to try it on a CPU.'
        raise SpecificationError(
            message("Every replica needs a device.", f"{num} replicas, {len(devices)} devices", attempt)
        )
    if jax.process_count() > 1 and num != len(devices):
        must = "Several processes train with all of their devices."
        raise SpecificationError(message(must, f"replicas={num}, {len(devices)} devices", "leave replicas out."))
    return None if len(devices[:num]) == 1 else MeshLayout(Mesh(np.array(devices[:num]), ("replicas",)), "replicas")


def spread_like(value: jax.Array, numbers: Numbers) -> jax.Array:
    """Return numbers with the sharding of a value of this shape; only local shards are read."""
    return jax.make_array_from_callback(value.shape, value.sharding, lambda index: numbers[index])
