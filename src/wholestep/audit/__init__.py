"""The audit: run the loop you have, and be told what is wrong with it. Called, it is `wholestep.audit.watch.audit`."""

import sys
from types import ModuleType
from typing import Any


class _Audit(ModuleType):
    """`wholestep.audit` is both this package and the function that users call."""

    def __call__(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit` of the arguments."""
        from wholestep.audit.watch import audit

        return audit(*arguments, **others)

    def call(self, *arguments: Any, **others: Any) -> Any:
        """Return `wholestep.audit.watch.audit.call` of the arguments."""
        from wholestep.audit.watch import audit

        return audit.call(*arguments, **others)


sys.modules[__name__].__class__ = _Audit
