"""Results that repeat to the bit on a GPU: one switch, set before the engine starts."""

from wholestep.engines import make_deterministic
from wholestep.errors import invalid

_is_set = False


def deterministic() -> None:
    """Let the engine use operations on a GPU whose results repeat to the bit.

    Without it, a gradient of rows that share an embedding is summed in any order, and XLA chooses
    kernels by timing them. On a CPU results repeat in any case. On JAX this adds
    `--xla_gpu_deterministic_ops=true` to the environment variable XLA_FLAGS, which counts for
    processes that are started later too; on TensorFlow it calls
    `tf.config.experimental.enable_op_determinism()`, which needs `keras.utils.set_random_seed`.
    Sums by index (embeddings) and some convolutions then take longer.

    Raises:
        SpecificationError: it is too late: on JAX after the first array or model, on TensorFlow
            after the first `Trainer`.
    """
    global _is_set
    if not _is_set and not make_deterministic():
        must = "wholestep.deterministic() must be called before the engine is in use."
        raise invalid(must, "an array, a model or a Trainer", "call it first in the script.")
    _is_set = True
