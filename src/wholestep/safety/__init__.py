"""Guards: no trainer is used twice at once, and no interrupt leaves half an update. Other packages import from here."""

from wholestep.safety.interrupts import (
    Ended,
    Guard,
    Terminated,
    TerminatedWaiting,
    Termination,
    check_process,
    end_when_terminated,
    uninterrupted,
    waiting,
)

__all__ = [
    "Ended",
    "Guard",
    "Terminated",
    "TerminatedWaiting",
    "Termination",
    "check_process",
    "end_when_terminated",
    "uninterrupted",
    "waiting",
]
