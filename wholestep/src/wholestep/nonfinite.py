"""Updates that are not finite are not applied: the first ends the run, or some are skipped."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from keras import ops

from wholestep.checks import count, made_with
from wholestep.state import Failures, State
from wholestep.tree import Tensor

# in a report: an update was applied, or skipped; or it was not applied, and ends the run
IS_APPLIED, IS_SKIPPED, ENDS = 1, 0, -1


@made_with("Skip takes its bounds by name.", "Skip(in_a_row=5, in_epoch=100).")
@dataclass(frozen=True)
class Skip:
    """Skips updates whose loss, gradient or moving statistics are not finite, up to a bound.

    The update that reaches a bound ends the run with a NonFiniteError, which names its rows; the
    weights are those before it.

    Args:
        in_a_row: the bound of updates one after the other; None for none.
        in_epoch: the bound of updates in an epoch of `fit` or `steps`; None for none.

    Raises:
        SpecificationError: a bound is no whole number of at least 1.

    Failures are not counted where a `LossScaleOptimizer` skips them itself.

    >>> Skip(in_a_row=3)
    Skip(in_a_row=3)
    """

    _: KW_ONLY
    in_a_row: int | None = None
    in_epoch: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("in_a_row", self.in_a_row), ("in_epoch", self.in_epoch)):
            if bound is not None:
                num = count(name, bound, f"{name}=10, or leave it out for no bound.")
                object.__setattr__(self, name, num)  # Python's, of any library's

    def __repr__(self) -> str:
        bounds = {"in_a_row": self.in_a_row, "in_epoch": self.in_epoch}
        given = [f"{name}={bound}" for name, bound in bounds.items() if bound is not None]
        return f"Skip({', '.join(given)})"

    def __str__(self) -> str:
        if self.raises:
            return "raise"
        return repr(self) if self.has_bound else "skip"

    @property
    def raises(self) -> bool:
        """Whether the first update that is not finite ends the run."""
        return self.in_a_row == 1

    @property
    def has_bound(self) -> bool:
        """Whether some update may end the run."""
        return self.in_a_row is not None or self.in_epoch is not None

    @property
    def reached(self) -> str:
        """The words of an error about a bound that is reached."""
        return "" if self.raises else f", as a bound of {self} is reached"

    @property
    def way_out(self) -> str:
        """The words of an error about how to go on nevertheless."""
        return 'pass Trainer(on_nonfinite="skip")' if self.raises else "raise the bound"

    @property
    def no_failures(self) -> tuple[Any, ...]:
        """The numbers of failures at the begin of a run; () if they need not be counted."""
        if self.raises or not self.has_bound:
            return ()
        return np.int32(0), np.int32(0)

    def counted(self, state: State, ok: Tensor) -> tuple[State, Tensor]:
        """Return the state after an update that was applied if `ok`, and the update's verdict."""
        if not self.has_bound:
            return state, ok
        if self.raises:
            stopped = ops.where(ok, state.stopped, ops.ones_like(state.stopped))
            return state._replace(stopped=stopped), ok
        in_a_row, in_epoch = state.failures
        in_a_row = ops.where(ok, ops.zeros_like(in_a_row), in_a_row + 1)
        in_epoch = ops.where(ok, in_epoch, in_epoch + 1)
        ends = ops.zeros_like(ok)
        for num, bound in ((in_a_row, self.in_a_row), (in_epoch, self.in_epoch)):
            if bound is not None:
                ends |= ~ok & (num >= bound)
        stopped = ops.where(ends, ops.ones_like(state.stopped), state.stopped)
        verdict = ops.where(ok, IS_APPLIED, ops.where(ends, ENDS, IS_SKIPPED))
        return state._replace(stopped=stopped, failures=(in_a_row, in_epoch)), verdict


RAISE = Skip(in_a_row=1)


def restarted(state: State, begins: Tensor) -> State:
    """Return the state, not stopped and with no failures in the epoch, where an epoch begins."""
    stopped = ops.where(begins, ops.zeros_like(state.stopped), state.stopped)
    failures: Failures = ()
    if state.failures:
        in_a_row, in_epoch = state.failures
        has_ended = begins & (state.stopped > 0)
        failures = (
            ops.where(has_ended, ops.zeros_like(in_a_row), in_a_row),
            ops.where(begins, ops.zeros_like(in_epoch), in_epoch),
        )
    return state._replace(stopped=stopped, failures=failures)
