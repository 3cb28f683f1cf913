"""The devices and replicas on JAX: batches are spread over replicas, variables placed by their
layouts.
"""

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wholestep.checkpoints import Numbers
from wholestep.engines.protocol import Alike, Carried, Data, Found, Shares
from wholestep.errors import BatchError, SpecificationError, message
from wholestep.jax_private import has_backends
from wholestep.patches import replaced
from wholestep.processes import Processes
from wholestep.tree import HUGE, Copies, Tensor, Tree, address, aligned_copy, leaves, map_leaves

_INT32 = np.iinfo(np.int32)


class MeshLayout:
    """A mesh of devices, one axis of which is the replicas; the parts of an engine have None for
    one device.

    Args:
        mesh: the devices.
        axis: the axis over which the rows of a batch are spread.
        distribution: the `keras.distribution` that places variables; None if every device holds all
            of them.
    """

    def __init__(self, mesh: Mesh, axis: str, distribution: Any = None):
        self.mesh = mesh
        self.axis = axis
        self.distribution = distribution
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec(axis))
        self.num_replicas: int = mesh.shape[axis]
        replicas = enumerate(np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0))
        own = jax.process_index()
        self.local_replicas = [
            i for i, some in replicas if any(d.process_index == own for d in np.ravel(some))
        ]

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
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def spread(self, leaf: np.ndarray, shares: np.ndarray) -> jax.Array:
        """Place each replica's share of the rows; `shares` are row indices, int (replicas, rows of
        a replica).
        """
        shape = (*shares.shape, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, self.rows, lambda index: leaf[shares[index[0]]])


def spread_like(value: jax.Array, numbers: Numbers) -> jax.Array:
    """Return numbers with the sharding of a value of this shape; only local shards are read."""
    return jax.make_array_from_callback(value.shape, value.sharding, lambda index: numbers[index])


_NO_MEMORY = (
    "A program needed more memory than the device has. If it was an update, the weights are lost: "
    "go on from a "
    "checkpoint, or with a new model. Try: a smaller microbatch_size, or memory_limit=BYTES with "
    'microbatch_size="auto", which cuts the batch until XLA says that the program fits.'
)


class JaxDevices:
    """The part `devices` of the engine on JAX.

    Args:
        is_eager: whether programs need arrays of JAX, as user code sees them.
    """

    def __init__(self, layout: MeshLayout | None, processes: Processes, *, is_eager: bool):
        self.layout = layout
        self.num_replicas = 1 if layout is None else layout.num_replicas
        self.local_replicas = [0] if layout is None else layout.local_replicas
        self._processes = processes
        self._must_place = is_eager or layout is not None

    def memory(self) -> int | None:
        """Return the free bytes of the device's memory; None where it is the host's."""
        found = jax.local_devices()[0].memory_stats() or {}
        return found["bytes_limit"] - found["bytes_in_use"] if "bytes_limit" in found else None

    def place(self, data: Data) -> Data:
        """Put host arrays on the device immediately; with several devices, on each."""
        data = jax.tree.map(_narrow, data)
        if self.layout is None:
            return jax.device_put(data)
        return jax.tree.map(lambda leaf: self.layout.put(leaf, self.layout.everywhere), data)

    def resident(self, data: Data) -> tuple[Data, Callable[[], None]]:
        """Put copies of host arrays on the device: JAX uses an aligned array as it is, which the
        user may change.
        """
        copies = Copies()
        if self.memory() is not None:
            return self.place(data), copies.wait
        copied = map_leaves(partial(_copy, copies), data)
        if self.layout is not None:
            copies.wait()
        placed = self.place(copied)
        if copies.pending and not copies.pending.keys() <= {
            leaf.unsafe_buffer_pointer() for leaf in leaves(placed)
        }:
            copies.wait()  # a copy that JAX has copied was not complete
            placed = self.place(copied)
        return placed, copies.wait

    def stage(self, data: Tree, shares: np.ndarray | None = None) -> Tree:
        """Return host arrays as a program takes them fastest: unchanged on one device, to each
        replica its share.
        """
        if shares is not None and self.layout is not None:
            layout = self.layout
            return Shares(jax.tree.map(lambda leaf: layout.spread(_narrow(leaf), shares), data))
        return self.place(data) if self._must_place else map_leaves(_narrow, data)

    def fetch(self, values: Tree) -> Any:
        """Return device values as numpy. Waits for the device, whose errors are raised here."""
        try:
            with self._processes.waiting("computing"):
                return (
                    np.asarray(values)
                    if isinstance(values, jax.Array)
                    else jax.tree.map(np.asarray, values)
                )
        except jax.errors.JaxRuntimeError as error:
            if "Out of memory" in str(error):
                error.add_note(_NO_MEMORY)
            raise

    def is_ready(self, values: Tree) -> bool:
        """Whether the values can be fetched without waiting for a device."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(values))


class JaxReplicas:
    """The part `replicas` of the engine on JAX."""

    is_split = False  # arrays are global, unless an update is better split
    coupling_layers: Collection[keras.layers.Layer] = ()

    def __init__(self, layout: MeshLayout | None):
        self.layout = layout
        self.count = 1 if layout is None else layout.num_replicas
        self.can_split = self.count > 1
        if layout is not None and isinstance(layout.distribution, keras.distribution.ModelParallel):
            self.can_split = False  # layers may name the axis of the rows
        self._is_inside = False  # whether the part of one replica is being traced

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

        Called outside of replicas the function returns totals too, of global arrays; but XLA
        reduces the gradient of each microbatch. It must not close over an array: that is global
        outside, and local to a replica inside.
        """
        layout = self.layout
        assert layout is not None

        def work(data: Tree, carried: Carried, given: Data) -> tuple[Found, Carried, Alike]:
            if isinstance(data, Shares):
                data = Shares(jax.tree.map(lambda leaf: leaf[0], data.leaves))
            with replaced(self, _is_inside=True):
                sums, after, alike = function(data, carried, given)
            moves = jax.tree.map(jnp.subtract, after, carried)
            sums, moves = jax.lax.psum((sums, moves), layout.axis)
            return sums, jax.tree.map(jnp.add, carried, moves), alike

        everywhere = PartitionSpec()
        of_data = PartitionSpec(layout.axis) if isinstance(data, Shares) else everywhere
        options: dict[str, Any] = {"axis_names": {layout.axis}, "check_vma": False}
        specs = {"in_specs": (of_data, everywhere, everywhere), "out_specs": everywhere}
        return jax.shard_map(work, mesh=layout.mesh, **specs, **options)(data, carried, given)

    def batch(self, data: Tree, rows: Tensor) -> Any:
        """Return the rows of a (micro)batch, spread evenly over replicas; of `Shares`, `rows` index
        the shares.
        """
        layout = self.layout
        if layout is None:
            return gather(data, rows)
        if self._is_inside:
            return gather(data.leaves if isinstance(data, Shares) else data, self.part(rows)[0])
        if isinstance(data, Shares):
            each = -(-rows.shape[0] // layout.num_replicas)
            places = jnp.resize(rows, (layout.num_replicas, each))
            found = jax.vmap(gather)(data.leaves, places)
            batch = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: rows.shape[0]], found
            )
        else:
            batch = gather(data, rows)
        return jax.lax.with_sharding_constraint(batch, layout.rows)

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return the part of a vector over a (micro)batch that belongs to the rows that `batch`
        returns, its start.
        """
        if self.layout is None or not self._is_inside:
            return rows, 0
        each = rows.shape[0] // self.layout.num_replicas
        start = jax.lax.axis_index(self.layout.axis) * each
        return jax.lax.dynamic_slice_in_dim(rows, start, each), start


def find_replicas(model: keras.Model | None, replicas: int | str | None) -> JaxReplicas:
    """Return the replicas set by `keras.distribution` or `replicas`.

    Raises:
        SpecificationError: the two contradict each other, or there are too few devices.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        layout = MeshLayout(
            distribution.device_mesh.backend_mesh, distribution.batch_dim_name, distribution
        )
        if replicas not in (None, "all", layout.num_replicas):
            must = "replicas must be left out under keras.distribution, which sets them."
            raise SpecificationError(
                message(must, f"replicas={replicas} and {distribution}", "leave one out.")
            )
        return JaxReplicas(layout)
    devices = jax.devices()
    if replicas is None and jax.process_count() == 1:
        return JaxReplicas(None)
    num = len(devices) if replicas in (None, "all") else int(replicas)
    if num > len(devices):
        received = f"{num} replicas, {len(devices)} devices"
        attempt = (
            f'replicas="all", or XLA_FLAGS=--xla_force_host_platform_device_count={num} to try '
            "it on a CPU."
        )
        raise SpecificationError(message("Every replica needs a device.", received, attempt))
    if jax.process_count() > 1 and num != len(devices):
        must = "Several processes train with all of their devices."
        raise SpecificationError(
            message(must, f"replicas={num}, {len(devices)} devices", "leave replicas out.")
        )
    is_one = len(devices[:num]) == 1
    return JaxReplicas(
        None if is_one else MeshLayout(Mesh(np.array(devices[:num]), ("replicas",)), "replicas")
    )


def make_deterministic() -> bool:
    """Let operations on a GPU repeat to the bit; False if JAX has read XLA's flags already."""
    if has_backends():
        return False
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*flags, "--xla_gpu_deterministic_ops=true"])
    return True


def gather(data: Data, rows: Tensor) -> Data:
    """Return these rows of every leaf; row numbers are in range."""
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), data)


def _copy(copies: Copies, leaf: Tensor) -> Tensor:
    """Return an aligned copy of a host array, which JAX uses as it is on a CPU; unchanged if JAX
    copies it.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.name != held_dtype(array.dtype.name):  # JAX converts it at once
        return aligned_copy(array)
    return array if address(array) % 64 and array.nbytes < HUGE else copies.copy(array)


def held_dtype(dtype: str) -> str:
    """Return the dtype of JAX's arrays made from such numbers."""
    return jax.dtypes.canonicalize_dtype(dtype).name


def _narrow(leaf: Tensor) -> np.ndarray | jax.Array:
    """Convert 64-bit integers to 32 bits as JAX would, but refuse values that would wrap around."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or jax.config.jax_enable_x64:
        return array
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise BatchError(
            message(
                "Integers must fit in 32 bits on this engine.",
                f"values from {array.min()} to {array.max()}",
                "enable 64-bit integers with jax.config.update('jax_enable_x64', True), or "
                "renumber them.",
            )
        )
    return array.astype(np.int32)
