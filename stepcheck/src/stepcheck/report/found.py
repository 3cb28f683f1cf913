"""The findings of an audit: a cause with its proof, and the numbers that prove it."""

import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb

import numpy as np

from stepcheck import values
from stepcheck.errors import SpecificationError
from stepcheck.report.causes import BY_NAME
from stepcheck.trace.log import Line

UNKNOWN = "not known"
NUM_SHOWN = 3
_PACKAGE, _NUMPY = str(Path(__file__).parent.parent), str(Path(np.__file__).parent)
_MOST_NUMBERS = 4  # of an array
_LONGEST = 200  # letters of an error in a report


def on_one_line(error: Exception) -> str:
    """Return the kind and the beginning of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]


def own_fault(error: BaseException) -> str:
    """Return in words that this library raised an error; "" if the user, Keras or the engine raised it.

    The innermost function outside of numpy and Python's library decides; the text of an engine's error may name it.
    """
    places = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    in_text = [(file, int(number)) for file, number in re.findall(r'File "(.+?)", line (\d+)', str(error))]
    file, number = next((place for place in reversed(places + in_text) if not _is_called(place[0])), ("", 0))
    if isinstance(error, SpecificationError) or not file.startswith(_PACKAGE) or _is_of_arguments(error):
        return ""
    told = f"{type(error).__name__}: {error}".splitlines()[0] + f", {Path(file).name}:{number}"
    is_cut = any("removed its internal frames" in note for note in getattr(error, "__notes__", ()))  # by JAX
    if in_text or is_cut:  # the engine's own functions are left out
        return f"an error where the audit listens ({told}): if the script runs without it, please report it"
    return f"an error inside of stepcheck, and no fault of the script ({told}): please report it"


def _is_of_arguments(error: BaseException) -> bool:
    """Whether a function of the user refuses its arguments, which this library only passes on."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    name = str(error).partition("()")[0]
    own = [each for each in frame.f_locals.values() if callable(each) and getattr(each, "__qualname__", "") == name]
    return isinstance(error, TypeError) and any(not str(each.__module__).startswith("stepcheck") for each in own)


def _is_called(file: str) -> bool:
    """Whether a file is of Python's library or of numpy: their errors are their callers'."""
    is_pythons = file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file
    return is_pythons or file.startswith((_NUMPY, "<"))


class Likely(str):
    """A note that is very likely the fault: a report without a cause begins with it.

    `names`: of causes that say the same, with which the note is left out.
    """

    names: tuple[str, ...] = ()

    def of(self, *names: str) -> "Likely":
        """Return the note with the names of such causes."""
        self.names = names
        return self


@dataclass(frozen=True)
class Number:
    """One number of a proof: its name, and three values; NaN where there is none."""

    what: str
    yours: float
    reference: float
    changed: float


@dataclass(frozen=True)
class Proof:
    """The same numbers three times: of the loop, of the reference, and of the reference with the fault.

    Attributes:
        where: the update or quantity, in words.
        step: the distance of the weights' step from the reference's; NaN if it was not computed again.
        parameters: of a gradient, by parameter: the distance from the reference, and from it with the fault.
    """

    where: str
    lines: tuple[Number, ...]
    step: float = float("nan")
    parameters: tuple[tuple[str, float, float], ...] = ()


def of_values(where: str, name: Callable[[int], str], values: Sequence[np.ndarray]) -> Proof:
    """Return the proof of (yours, reference, changed), vectors: the numbers in which the first two differ most."""
    yours, reference, changed = (np.ravel(np.asarray(each, "float64")) for each in values)
    order = np.argsort(-np.abs(yours - reference), kind="stable")[:NUM_SHOWN]
    numbers = ((int(i), float(yours[i]), float(reference[i]), float(changed[i])) for i in sorted(order))
    return Proof(where, tuple(Number(name(i), *three) for i, *three in numbers))


@dataclass(frozen=True)
class Found:
    """One fault of a loop.

    Attributes:
        name: of the cause; "not known" for a difference that none reproduces.
        stage: where the loop first differs from the update that was meant.
        explanation: the fault, in a sentence.
        without: the relative distance of the loop's numbers from the reference's.
        with_change: their distance from the reference with this fault; NaN if the fault is not known.
        proof: the numbers of one update, three times; None where there are none to show.
        twins: other causes that reproduce the same numbers.
        is_beside: whether the reference has the other faults of the gradient, in the distances and in the proof.
        finding: the same as a value, of the gradient.
    """

    name: str
    stage: str
    explanation: str
    fix: str
    without: float
    with_change: float
    line: Line | None
    updates: tuple[int, ...]
    detail: str = ""
    proof: Proof | None = None
    twins: tuple[str, ...] = ()
    is_beside: bool = False
    finding: values.Finding | None = None

    @property
    def is_known(self) -> bool:
        """Whether a change of the reference reproduces the loop's numbers."""
        return self.name != UNKNOWN

    @property
    def is_listed(self) -> bool:
        """Whether the field has a name for it."""
        return self.name in BY_NAME


Finding = Found | str  # a fault, or a note: no fault, or perhaps intended


def found(
    name: str,
    without: float,
    line: Line | None,
    updates: Iterable[int],
    detail: str = "",
    *,
    with_change: float = 0.0,
    proof: Proof | None = None,
    twins: tuple[str, ...] = (),
) -> Found:
    """Return the finding of a known cause."""
    cause = BY_NAME[name]
    distances = float(without), float(with_change)
    return Found(
        name, cause.stage, cause.explanation, cause.fix, *distances, line, tuple(updates), detail, proof, twins
    )


def not_known(
    stage: str, explanation: str, without: float, line: Line | None, updates: Iterable[int], proof: Proof | None = None
) -> Found:
    """Return the finding of a difference that nothing known reproduces."""
    fix = "nothing is proposed: no known cause reproduces these numbers."
    return Found(UNKNOWN, stage, explanation, fix, float(without), float("nan"), line, tuple(updates), "", proof)


def numbers_of(values: np.ndarray) -> str:
    """Return the first numbers of an array in words.

    >>> numbers_of(np.array([0.5])), numbers_of(np.arange(6.0))
    ('0.5', '(0, 1, 2, 3, ...)')
    """
    return listed(values) if np.size(values) == 1 else f"({listed(values)})"


def listed(values: np.ndarray) -> str:
    """Return the first numbers of an array, without brackets."""
    return some((f"{value:.4g}" for value in np.ravel(values).tolist()), _MOST_NUMBERS)


def some(parts: Iterable[object], num: int = 8) -> str:
    """Return the first ones in words.

    >>> some(range(3)), some("abc", 2)
    ('0, 1, 2', 'a, b, ...')
    """
    words = list(map(str, parts))
    return ", ".join(words[:num]) + (", ..." if len(words) > num else "")


def many(num: int, one: str, more: str = "") -> str:
    """Return a number with its noun.

    >>> many(1, "update"), many(2, "batch", "batches")
    ('1 update', '2 batches')
    """
    return f"{num} {one if num == 1 else more or one + 's'}"
