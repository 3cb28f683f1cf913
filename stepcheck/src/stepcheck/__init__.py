"""stepcheck: gradcheck for a whole training step."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stepcheck.errors import SpecificationError, message
from stepcheck.objective import Objective
from stepcheck.probe import probe

if TYPE_CHECKING:
    from stepcheck.report.difference import Comparison
    from stepcheck.report.report import Report
    from stepcheck.trace.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "Objective",
    "SpecificationError",
    "diff",
    "load",
    "probe",
    "record",
    "watch",
]


def watch(
    model: Any,
    data: Any = None,
    loss: Any = None,
    *,
    learning_rate: float | Callable[[int], Any] | None = None,
    optimizer: Any = None,
    rows: str | None = None,
) -> AbstractContextManager["Report"]:
    """Watch a training loop, and prove that each update is, or is not, the one that was
    meant.

    Nothing of the training changes. A few updates are enough: two passes over a few
    batches show most. The first 40 updates are kept with all their numbers; of a model
    of more than 6e5 weights as many as fit in 100 MB, but at least four. Models that
    train in turn are watched in one `with`, each by its `watch`.

    Keras, on JAX or TensorFlow: loops that use `fit` or `train_on_batch` (also with a
    custom `train_step`), `tf.GradientTape` (eager, or in a `tf.function` whose first
    call is inside the `with`, also under a `tf.distribute.MirroredStrategy`), or JAX'
    `stateless_call` and `stateless_apply` (plain or jitted), with an optimizer of
    Keras. PyTorch: loops that call the module and an optimizer of PyTorch, in one
    process or in several (`DistributedDataParallel`): each watches its loop, and
    process 0 judges.

    Args:
        model: the Keras model, or the module of PyTorch, that the loop trains.
        data: (x, y) or (x, y, sample_weight), arrays as the model gets them; row i of
            all belongs together. PyTorch: tensors or arrays, or a map-style dataset;
            None for the rows that the module is given. With an `Objective`: (x, ...),
            of any number of parts, or None for the rows that the model is given.
        loss: the loss that is meant. Keras: a loss, its name, a function (labels,
            outputs), a list or dict of them, one for each output, or an `Objective` of
            wholestep; None for the compiled loss. PyTorch: a loss of `torch.nn` or
            `torch.nn.functional`, or a function of outputs and labels that returns a
            value for each row, or (values, weights); None for the loss that the model
            computes itself of its labels, as Transformers' do. Any other loss: an
            `Objective`, a function of the model and a batch.
        learning_rate: the rate that is meant: a number, or a function (or a schedule of
            Keras) of the number of the update, from 0; None for the schedule of the
            optimizer, if it has one.
        optimizer: the optimizer that is meant. If the loop applies another one, its
            steps are compared with those that this one makes of the same gradients, at
            the loop's rates. Keras: its schedule, if it has one, is the learning rate
            that is meant; None: the compiled one, or the loop's.
        rows: how each pass over the data is meant to use the rows. "once": each row
            once, and an update ends where the pass ends; "shuffled": in a new order in
            each pass, too. None: not stated, and not judged.

    Yields:
        A `Report`, complete after the `with`: print it, or read its `findings`.

    Raises:
        SpecificationError: the model, the data or the loss cannot be watched. Nothing
            was hooked.

    >>> import keras, numpy as np, stepcheck
    >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> with stepcheck.watch(model, data=(x, y), loss="mse") as report:
    ...     pass  # the loop
    >>> report.has_seen, report.findings
    (False, [])
    """
    stated: dict[str, Any] = {
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "rows": rows,
    }
    if _is_of("torch.nn", "Module", model):
        from stepcheck.torch.watch import watched

        return watched(model, data, loss, **stated)
    if not _is_of("keras", "Model", model):
        must = "model must be a model of Keras or a module of PyTorch."
        raise SpecificationError(
            message(
                must,
                type(model).__name__,
                "stepcheck.watch(model, data=(x, y)).",
            )
        )
    from stepcheck.keras.watch import watched as watched_by_keras

    return watched_by_keras(model, data, loss, **stated)


def record(*models: Any) -> AbstractContextManager["Trace"]:
    """Record a training, to compare it with another by `stepcheck.diff`. Nothing of the
    training changes.

    Any training of Keras on JAX or TensorFlow, or of PyTorch: `fit`, a Trainer, a loop.
    The first updates are kept with their numbers: 40, or as many as fit in 100 MB; of
    large arrays, 20 000 entries. Of later ones the rows, and a few numbers for each
    parameter.

    Args:
        models: the models to record; none for all that are called and trained.

    Yields:
        A `Trace`, complete after the `with`; `trace.save(path)` writes it to a file.

    Raises:
        SpecificationError: no framework is imported. Nothing has been hooked.

    >>> import keras, numpy as np, stepcheck
    >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with stepcheck.record() as trace:
    ...     _ = model.fit(x, y, batch_size=4, verbose=0)
    >>> trace.num_updates
    2
    """
    from stepcheck.recording import recorded

    return recorded(*models)


def load(path: str | os.PathLike) -> "Trace":
    """Return the trace that `Trace.save` wrote. Needs no framework, and runs no code of
    the file.

    Raises:
        SpecificationError: the file is not a trace, or one of another version of
            stepcheck.
    """
    from stepcheck.trace.trace import load

    return load(path)


def diff(
    a: Any,
    b: Any,
    *,
    match: Callable[[str], Any] | None = None,
    bits: bool = False,
) -> "Comparison":
    """Compare two trainings, update by update: where do they differ first?

    Each update has rows, outputs, a gradient, a step and a state. Rows in another order
    inside of an update are no difference, nor are updates that one run makes of several
    microbatches or replicas. After the first difference the updates differ anyway: they
    "follow". Rounding grows from update to update, and is no difference.

    Args:
        a: a trace, or the path of one.
        b: the trace to compare it with.
        match: of the name of a parameter of a, the name in b, or (the name in b, a
            function that returns b's array in the shape of a's), or None to leave it
            out; by default parameters are matched by their names, or by their order and
            shapes.
        bits: whether numbers must be equal to the bit; else up to the rounding of their
            dtype.

    Returns:
        A `Comparison`: print it, or read `is_equal` and `first`, or `require()` it in a
            test.

    Raises:
        SpecificationError: a file is not a trace, or the parameters cannot be matched.

    >>> import keras, numpy as np, stepcheck
    >>> x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    >>> def trace_of(loss):
    ...     keras.utils.set_random_seed(1)
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", loss)
    ...     with stepcheck.record() as trace:
    ...         _ = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    ...     return trace
    >>> stepcheck.diff(trace_of("mse"), trace_of("mse")).is_equal
    True
    >>> first = stepcheck.diff(trace_of("mse"), trace_of("mae")).first
    >>> first.update, first.part.value
    (1, 'gradient')
    """
    from stepcheck.recording import compared

    return compared(a, b, match=match, bits=bits)


def _is_of(module: str, kind: str, model: Any) -> bool:
    """Whether a model is of a kind of a framework, which is imported then."""
    return module in sys.modules and isinstance(
        model, getattr(sys.modules[module], kind)
    )
