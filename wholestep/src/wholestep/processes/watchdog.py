"""The verdict on a run of several processes: a pure function of their last signs of life."""

from typing import NamedTuple

# seconds that processes wait for a live process that does not join them; at least 10 median steps
PATIENCE = 20.0
START = 600.0  # the same during activities that may take long
_LONG = ("starting", "compiling", "saving")
# a process whose script has ended: it waits for the others, and its signs of life may stop
ENDING = "ending"


class Beat(NamedTuple):
    """A sign of life."""

    number: int  # counts the signs of the process
    doing: str  # its activity
    waits: str  # the call in which it waits for others; equal in processes that wait together
    seconds: float  # the duration of the activity
    step: float  # the median seconds from one dispatch to the next; 0 before the first


def judge(beats: dict[int, tuple[Beat, float]], patience: float = PATIENCE) -> str | None:
    """Return the reason why a run must end, if any.

    Args:
        beats: by process, its last sign of life and the seconds since then.
        patience: seconds that processes wait for a process that does not join them.
    """
    limit = max([patience, *(10 * beat.step for beat, _ in beats.values())])
    waiting = [beat.seconds for beat, _ in beats.values() if beat.waits]
    for process, (beat, silent) in beats.items():
        bound = silence(patience) * (4 if beat.doing.startswith(_LONG) else 1)
        if silent > bound and beat.doing != ENDING:
            what = f"no sign of life for {silent:.0f} s: killed, or stopped?"
            return f"Process {process} has given {what} It was {beat.doing}."
    apart = {
        beat.waits: f"process {process} is {beat.doing}"
        for process, (beat, _) in reversed(beats.items())
    }
    shortest = min((beat.seconds for beat, _ in beats.values()), default=0.0)
    if "" not in apart and len(apart) > 1 and shortest > limit:
        what = ", ".join(sorted(apart.values()))
        ask = "Do they have the same batches, and leave loops together?"
        return f"The processes wait for each other: {what}. {ask}"
    for process, (beat, _) in beats.items():
        bound = max(START, limit) if beat.doing.startswith(_LONG) else limit
        if not beat.waits and waiting and min(beat.seconds, max(waiting)) > bound:
            seconds = f"{beat.seconds:.0f} s"
            activity = f"has been {beat.doing} for {seconds}"
            if beat.doing == ENDING:
                activity = f"ended its script {seconds} ago"
            return f"Process {process} {activity}, while others wait for it."
    return None


def silence(patience: float) -> float:
    """Return the seconds without a sign of life after which a process counts as dead.

    A process that is alive is silent while C code keeps the interpreter, as in unpickling a large
    file.
    """
    return max(5.0, patience)
