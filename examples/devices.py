"""Several devices where there is one CPU, for the examples that share rows among replicas."""

import contextlib
import os

import keras


def split_cpu(num):
    """Let the CPU count as `num` devices. To be called before the first array is made."""
    if keras.backend.backend() != "tensorflow":
        os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={num}")
        return
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # TensorFlow has begun: then the devices are what they are
        parts = [tf.config.LogicalDeviceConfiguration()] * num
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def scope(num):
    """Return the scope in which a model for so many devices is built: TensorFlow wants one, JAX does not."""
    if num == 1 or keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)]).scope()
