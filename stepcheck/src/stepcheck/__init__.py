"""stepcheck: gradcheck for a whole training step."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stepcheck.errors import SpecificationError, message
from stepcheck.objective import Objective
from stepcheck.probe import probe

if TYPE_CHECKING:
    from stepcheck.report.report import Report

__version__ = "0.1.0.dev0"
__all__ = ["Objective", "SpecificationError", "probe", "watch"]


def watch(
    model: Any,
    data: Any = None,
    loss: Any = None,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
    optimizer: Any = None,
) -> AbstractContextManager["Report"]:
    """Watch a training loop, and prove that each update is, or is not, the one that was meant.

    Nothing of the training changes. A few updates are enough: two passes over a few batches show most. The first 40
    updates are kept with all their numbers; of a model of more than 6e5 weights as many as fit in 100 MB, but at least
    four.

    Keras, on JAX or TensorFlow: loops that use `fit` or `train_on_batch` (also with a custom `train_step`),
    `tf.GradientTape` (eager, or in a `tf.function` whose first call is inside the `with`, also under a
    `tf.distribute.MirroredStrategy`), or JAX' `stateless_call` and `stateless_apply` (plain or jitted), with an
    optimizer of Keras. PyTorch: loops on the CPU that call the module and an optimizer of PyTorch, in one process or in
    several (`DistributedDataParallel`): each watches its loop, and process 0 judges.

    Args:
        model: the Keras model, or the module of PyTorch, that the loop trains.
        data: (x, y) or (x, y, sample_weight), arrays as the model gets them; row i of all belongs together. PyTorch:
            tensors or arrays, or a map-style dataset; None for the rows that the module is given.
        loss: the loss that is meant. Keras: a loss, its name, a function (labels, outputs), a list or dict of them, one
            for each output, or an `Objective` of wholestep; None for the compiled loss. PyTorch: a loss of `torch.nn`
            or `torch.nn.functional`, or a function of outputs and labels that returns a value for each row, or
            (values, weights); None for the loss that the model computes itself of its labels, as Transformers' do.
            An `Objective`: a function of the model and a batch.
        learning_rate: the rate that is meant: a number, or a function (or a schedule of Keras) of the number of the
            update, from 0; None for the schedule of the optimizer, if it has one.
        optimizer: the optimizer that is meant. If the loop applies another one, the classes and
            arguments of both are compared, without their learning rates. Keras: its schedule, if it
            has one, is the learning rate that is meant; None: the compiled one.

    Yields:
        A `Report`, complete after the `with`: print it, or read its `findings`.

    Raises:
        SpecificationError: the model, the data or the loss cannot be watched. Nothing has been hooked.

    >>> import keras, numpy as np, stepcheck
    >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> with stepcheck.watch(model, data=(x, y), loss="mse") as report:
    ...     pass  # the loop
    >>> report.has_seen, report.findings
    (False, [])
    """
    if _is_of("torch.nn", "Module", model):
        from stepcheck.torch.watch import watched

        return watched(model, data, loss, learning_rate=learning_rate, optimizer=optimizer)
    if not _is_of("keras", "Model", model):
        must = "model must be a model of Keras or a module of PyTorch."
        raise SpecificationError(
            message(must, type(model).__name__, "stepcheck.watch(model, data=(x, y)).")
        )
    from stepcheck.keras.watch import watched as watched_by_keras

    return watched_by_keras(model, data, loss, learning_rate=learning_rate, optimizer=optimizer)


def _is_of(module: str, kind: str, model: Any) -> bool:
    """Whether a model is of a kind of a framework, which is imported then."""
    return module in sys.modules and isinstance(model, getattr(sys.modules[module], kind))
