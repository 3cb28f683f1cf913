"""The private side of Keras that this library reads. Tried with Keras 3.15.0 and 3.15.1.

Each function reads one attribute, for the use that it names. An attribute that Keras lacks is
refused by name, before an update; one with a default costs a message or some speed when it is
gone. A test runs without each in `USES`. Without a name that is imported here, or one of the tuples
below, the import or the first call fails.

Attributes that are written or overridden are named where that happens: a variable's `_value`
(engines.jax_variables, reports.update_ledger), `_all_reduce_sum_gradients`
(engines.tensorflow_devices), `_save_model` and `_save_checkpoint` of callbacks, the parts of a
progress bar (reports.compile_notices), the lists of an optimizer of some rows (embeddings.rows),
and the `zeros` of the backend (engines.jax_variables).
"""

from collections.abc import Callable
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import keras

# As Keras has no public name for these functions, an import that fails is the error.
from keras.src.backend import AutocastScope, compute_output_spec, get_keras_mask
from keras.src.backend import numpy as backend_numpy
from keras.src.backend import random as backend_random
from keras.src.backend.common.masking import set_keras_mask
from keras.src.random.seed_generator import draw_seed

from wholestep.errors import SpecificationError, message

__all__ = [
    "AutocastScope",
    "backend_numpy",
    "backend_random",
    "compute_output_spec",
    "draw_seed",
    "get_keras_mask",
    "set_keras_mask",
]

USES: dict[str, str] = {}  # by attribute


def _needed(name: str, use: str) -> Callable[[Any], Any]:
    """Return the function that reads an attribute, or refuses a version of Keras without it."""
    USES[name] = use

    def read(owner: Any) -> Any:
        try:
            return getattr(owner, name)
        except AttributeError as error:
            must = f"A Keras {type(owner).__name__} must have {name}, for {use}."
            received = f"Keras {keras.__version__} without it"
            attempt = "a version of Keras in the range of wholestep's requirements."
            raise SpecificationError(message(must, received, attempt)) from error

    return read


def _wanted(name: str, use: str, default: Any = None) -> Callable[[Any], Any]:
    """Return the function that reads an attribute, or returns the default."""
    USES[name] = use

    def read(owner: Any) -> Any:
        return getattr(owner, name, default)

    return read


# ---- layers and models ----

flatten_layers = _needed("_flatten_layers", "the layers inside of other layers")
takes_training = _needed("_call_has_training_arg", "whether a model is called with `training`")
trainable_variables = _needed("_trainable_variables", "the variables that training may change")
embeddings = _wanted("_embeddings", "the table of an Embedding, whose rows are updated alone")
functional = _wanted("_functional", "the inputs of a Sequential model by name")
nodes_by_depth = _wanted(
    "_nodes_by_depth", "a warning of Python values in a functional model", MappingProxyType({})
)
call_signature = _needed("_call_signature", "the names of a layer's arguments, in that warning")
inbound_nodes = _needed("_inbound_nodes", "the order of layers in a checkpoint's settings")
dtype_policy = _wanted("_dtype_policy", "the dtype in a checkpoint's settings")
initial_epoch = _wanted("_initial_epoch", "the epoch from which BackupAndRestore goes on")

# ---- what `compile` makes ----

compile_loss = _needed("_compile_loss", "the compiled losses")
compile_metrics = _needed("_compile_metrics", "the compiled metrics")
loss_tracker = _needed("_loss_tracker", "the mean of the loss")
compute_loss = _needed("_compute_loss", "a loss as `fit` computes it")
symbolic_build = _needed("_symbolic_build", "the variables of losses and metrics")
resolve_auto_jit = _needed("_resolve_auto_jit_compile", "whether jit_compile=False was chosen")
flat_losses = _needed("_flat_losses", "the losses by output")
flatten_y = _needed("_flatten_y", "the labels by output")
flat_metrics = _needed("_flat_metrics", "the metrics by output")
flat_weighted_metrics = _needed("_flat_weighted_metrics", "the weighted metrics by output")
wrapped = _wanted("_fn", "the function of a metric")
fn_kwargs = _wanted("_fn_kwargs", "the options of a loss or a metric", MappingProxyType({}))


def struct_of(model: Any, kind: str) -> Any:
    """Return the nesting of a functional model's "input" or "output"; for the names of labels."""
    return getattr(model, f"_{kind}s_struct", None)


def user_argument(compiled: Any, name: str) -> Any:
    """Return an argument of `compile` as the user passed it; for a line about changed settings."""
    return getattr(compiled, f"_user_{name}", None)


# by which a change of the model between two calls is noticed
COMPILED = "optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker", "run_eagerly"
HELD_BY_LAYER = attrgetter(
    "_layers", "_trainable_variables", "_non_trainable_variables", "_metrics"
)
IS_TRAINABLE = attrgetter("_trainable")

# the modules of Keras' losses: without it, an error about labels is Keras' own
LOSSES = "keras.src.losses"

# ---- optimizers ----

learning_rate = _wanted("_learning_rate", "whether the rate is a schedule")
optimizer_variables = _needed("_variables", "an optimizer of some rows of a table")
variable_key = _needed("_var_key", "an optimizer of some rows of a table")
clip_gradients = _needed("_clip_gradients", "the norm of the clipped gradient")
variable_index = _needed("_get_variable_index", "Adagrad's sums of some rows")

# ---- callbacks ----

is_default_hook = _wanted("_is_default", "which hooks a callback has", False)
flush_futures = _needed("_flush_futures", "the end of asynchronous callbacks")
should_trace = _needed("_should_trace", "whether TensorBoard reads every batch")
set_monitor_op = _needed("_set_monitor_op", "the direction of a monitored value")
direction = _wanted("_direction", "the direction of a metric that `keep_best` names")
total_width = _wanted("_prev_total_width", "notices beside the progress bar", 0)
