"""Small models and exact data for every test. The engine is the process's Keras backend.

Most of a test's time is compilation, so XLA and TensorFlow optimise as little as they can: the
tests hold at any level. With XLA_FLAGS given (as in `make large`) they compile as they do
for users.
"""

import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import zlib
from functools import partial
from importlib import metadata
from pathlib import Path

JAXLIB = [
    int(part)
    for found in metadata.distributions(name="jaxlib")
    for part in found.version.split(".")[:2]
]
sys.path.append(str(Path(__file__).parents[2] / "examples"))  # where one example helps another
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=8"
    + (" --xla_cpu_use_fusion_emitters=false" if JAXLIB < [0, 11] else ""),  # an error since
)

# Keras starts in half the time where these are missing (tests/lean). Tests import them afterwards.
SLOW = [name for name in ("matplotlib", "sklearn") if sys.modules.setdefault(name, None) is None]

import hypothesis  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402

for name in SLOW:
    del sys.modules[name]

# Garbage collection is rare: programs leave many objects, and few of them can be freed.
gc.set_threshold(50_000, 20, 30)
# It would collect garbage each time, also in all compiled programs: 0.4 s for a test.
keras.utils.clear_session = partial(keras.utils.clear_session, free_memory=False)


def _loaded_once(loaded, make):
    if not hasattr(loaded, "context"):
        loaded.context = make()
    return loaded.context


IS_QUICK = "optimization_level=0" in os.environ["XLA_FLAGS"]
if keras.backend.backend() == "jax" and IS_QUICK:
    import jax

    # Many tests compile the same. The folder is this process's own: JAX may read a file that
    # another is writing.
    COMPILED = tempfile.TemporaryDirectory(prefix="compiled-")
    jax.config.update("jax_compilation_cache_dir", COMPILED.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX loads all of MLIR's dialects for each program: 3 ms. One load for each thread is enough.
    lowering = importlib.import_module("jax._src.interpreters.mlir")
    loaded = threading.local()
    lowering.make_ir_context = partial(_loaded_once, loaded, lowering.make_ir_context)
elif keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    if IS_QUICK:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

# Whoever starts the tests may ignore Ctrl-C, which processes inherit (`nohup make test &`).
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("suite")

# On TensorFlow XLA takes half of a test's time; these files hold that what it compiles is the same.
WITH_XLA = (
    "test_compilers",
    "test_engines",
    "test_explain",
    "test_models",
    "test_cuts",
)

# These tests do not depend on the engine: data, orders, words, floors, pages. The suite runs them
# on JAX, except those marked as TensorFlow's `own`; the larger runs have them on both.
_EITHER = """
arguments batches block checkpoint_callbacks checkpoints class_weight cluster_plan
comparisons compile_notices cut damage diagnosis disk_faults epochs errors exit feed
fingerprint_of_data folder glove house interrupted_saves keras_file killed labels leaves lengths
order pieces preprocess readme recipes remote renamed_metrics resume sample_weights shared_folder
shell single_process source store stream translate_dates tree unread_failures
"""
EITHER = {f"test_{name}" for name in _EITHER.split()}

# These tests check code of each engine: the suite runs them on both. All others go through an
# engine, and hold on both alike: each of their tests is run on one of the two, by its name, unless
# it is an engine's `own`. TensorFlow, on which a test takes twice as long, has a
# quarter of them.
BOTH = {
    f"test_{name}"
    for name in (
        "backend",
        "compilers",
        "engines",
        "fingerprint",
        "models",
        "losses_of_tokens",
        "cuts",
    )
}


def _is_of_the_other(item):
    """Whether the suite leaves a test to the other engine, or to the larger runs."""
    module = item.module.__name__
    engine = keras.backend.backend()
    shares = [mark.args for mark in item.iter_markers("shared")]
    if shares:
        return any(_owner(owners, f"{i} {item.name}") != engine for i, owners in enumerate(shares))
    if module in BOTH or item.get_closest_marker("own"):
        return False
    if module in EITHER:
        return engine != "jax"
    is_for_one = item.get_closest_marker("skipif") is not None
    return not is_for_one and _owner(("jax", "tensorflow", "jax", "jax"), item.name) != engine


def _owner(owners, name):
    """Return the engine that runs a test, by a hash of its name: a new test moves no other."""
    return owners[zlib.crc32(name.encode()) % len(owners)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in filter(_is_of_the_other, items):
        item.add_marker(pytest.mark.large)


def pytest_collection_finish():
    gc.freeze()


def _only_if_asked(model, asked):
    return asked is True, "" if asked is True else "this test does without"


@pytest.fixture(autouse=True)
def _fresh(request, monkeypatch):
    if (
        IS_QUICK
        and keras.backend.backend() == "tensorflow"
        and request.module.__name__ not in WITH_XLA
    ):
        monkeypatch.setattr("wholestep.engines.tensorflow.choose_xla", _only_if_asked)
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler, f"The test left another handler of Ctrl-C: {left}"
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
