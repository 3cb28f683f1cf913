"""Small models and exact data for every test. The engine is the process's Keras backend."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "examples"))  # where one example helps another
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import keras
import pytest

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)

hypothesis.settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _fresh():
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
