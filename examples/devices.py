"""Several devices on one CPU, for the examples that use replicas."""

import contextlib
import os

import keras


def split_cpu(num):
    """Split the CPU into `num` devices. Call this before the first array is made."""
    if keras.backend.backend() != "tensorflow":
        os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={num}")
        return
    import tensorflow as tf

    # TensorFlow is initialised: its devices can no longer change
    with contextlib.suppress(RuntimeError):
        parts = [tf.config.LogicalDeviceConfiguration()] * num
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def scope(num):
    """Return the scope in which to build a model for `num` devices: TensorFlow needs one, JAX does
    not.
    """
    if num == 1 or keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)]).scope()
