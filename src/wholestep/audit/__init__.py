"""The audit: run your loop, and read its faults.

    with ws.audit(model, data=(x, y), loss="mse") as report:
        train()
    print(report)

Arguments of the call, which is `wholestep.audit.watch.audit`:
    model: the Keras model that the loop trains.
    data: (x, y) or (x, y, sample_weight), arrays with all rows of the training data.
    loss: as in `compile`, or a function that may return (values, weights); None for the compiled loss.
    learning_rate: the intended rate, a number or a function of the update; None for the optimizer's.
    optimizer: the intended optimizer, which a compiled one may not be.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import Signature, signature
from types import ModuleType
from typing import Any

from wholestep import backend
from wholestep.errors import SpecificationError, message


class _Audit(ModuleType):
    """`wholestep.audit` is one thing: this package, and the function that users call."""

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit` of the arguments."""
        module = getattr(sys.modules.get("torch"), "nn", None)
        if module is not None and arguments and isinstance(arguments[0], module.Module):
            must, attempt = "ws.audit needs a Keras model.", "ws.audit.torch(model, data=(x, y), loss=...)."
            raise SpecificationError(message(must, "a module of PyTorch", attempt))
        return self._own()(*arguments, **others)

    def call(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit.call` of the arguments."""
        return self._own().call(*arguments, **others)

    def torch(
        self,
        model: Any,
        data: Any = None,
        loss: Any = None,
        *,
        learning_rate: float | Callable[[int], Any] | None = None,
    ) -> AbstractContextManager:
        """Watch a plain training loop of PyTorch, and report its faults, by name and with proof.

        Nothing of the training changes. Looked at are loops on the CPU that call the module and an optimizer of
        PyTorch, in one process or in several (`DistributedDataParallel`): each audits its loop, and process 0 judges.

        Args:
            model: the module that the loop trains, as it is called.
            data: (x, y) or (x, y, weights), tensors or arrays as module and loss get them, or a map-style dataset;
                None for the rows that the module is given, as of a generator that is given noise.
            loss: the loss that is meant: a loss of `torch.nn` or `torch.nn.functional`, or a function of outputs and
                labels that returns a value for each row, or (values, weights); None for the one loss of PyTorch that
                the loop calls.
            learning_rate: the rate that is meant: a number, or a function of the number of the update, from 0.

        Yields:
            A `wholestep.audit.report.Report`, complete after the `with`: print it, or read its `causes`.

        Raises:
            SpecificationError: the module, the data or the loss cannot be audited. Nothing has been hooked.

        Example:
            with ws.audit.torch(model, data=(x, y), loss=torch.nn.MSELoss()) as report:
                train()
            print(report)
        """
        from wholestep.audit.pytorch.watch import watched

        return watched(model, data, loss, learning_rate=learning_rate)

    @property
    def __signature__(self) -> Signature:
        """The signature of the function."""
        return signature(self._own())

    def _own(self) -> Any:
        backend.check()
        from wholestep.audit.watch import audit

        return audit


sys.modules[__name__].__class__ = _Audit
