"""The audit: run your loop, and read its faults. Calling the package calls `wholestep.audit.watch.audit`."""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any

from wholestep import backend


class _Audit(ModuleType):
    """`wholestep.audit` is one thing: this package, and the function that users call."""

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit` of the arguments."""
        return self._own()(*arguments, **others)

    def call(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit.call` of the arguments."""
        return self._own().call(*arguments, **others)

    @property
    def __signature__(self) -> Signature:
        """The signature of the function."""
        return signature(self._own())

    def _own(self) -> Any:
        backend.check()
        from wholestep.audit.watch import audit

        return audit


sys.modules[__name__].__class__ = _Audit
