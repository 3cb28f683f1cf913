"""When somebody will look at the state of a training: how many updates are worth sending at once."""

from collections import deque

_MOST_DEBT, _MOST_CREDIT = -64.0, 256.0  # dispatches that were saved, less what was computed in vain
_REST, _LONGEST_REST = 64, 4096  # updates
_LOOK = 0.5  # what it costs to see a look where nothing was sent ahead
_SAVED = 150e-6  # seconds that an update costs more by itself than among others (docs/notes/log.md)


class Looks:
    """Foretells how many updates will go by before somebody looks.

    Where somebody has looked after so many updates, so many are worth sending; twice as many as before where nobody
    has. Where looks cannot be foretold, and cost more than was saved, updates go by themselves for a while, each time
    for longer.

    >>> looks = Looks()
    >>> sizes = []
    >>> for _ in range(5):
    ...     sizes.append(looks.wanted)
    ...     looks.note_end(sizes[-1], 0, seconds=1e-4)
    >>> sizes
    [2, 4, 8, 16, 32]
    >>> looks.note_look()
    >>> looks.note_end(50, 0, seconds=1e-4)
    >>> looks.note_look()  # 50 updates later
    >>> looks.wanted
    50
    """

    def __init__(self) -> None:
        self._since = 0  # updates since somebody has looked
        self._has_seen = False  # since when every look has been seen: only then is the time between two known
        self._gaps: deque[int] = deque(maxlen=4)  # updates between looks
        self._latest = 1
        self._balance = 0.0
        self._rest = 0  # updates that are still to go by themselves
        self._next_rest = _REST

    @property
    def wanted(self) -> int:
        """How many updates are worth sending at once; 0 if they are to go by themselves, and nobody is watched."""
        if self._rest > 0:
            return 0
        to_look = min(self._gaps) - self._since if self._gaps and self._has_seen else 0
        return to_look if to_look > 0 else 2 * self._latest

    def note_look(self) -> None:
        """Somebody looks, after all updates that have been noted."""
        if self._has_seen:
            self._gaps.append(self._since)
        self._since, self._has_seen = 0, True
        self._note_gain(-_LOOK)

    def note_end(self, num: int, in_vain: int, seconds: float) -> None:
        """A dispatch is over, of which so many updates were of use; others have been computed in vain.

        Args:
            seconds: what an update takes.
        """
        if self._rest > 0:
            self._rest = max(0, self._rest - num)  # meanwhile nobody is seen to look
        else:
            self._latest, self._since = num, self._since + num
            self._note_gain(num - 1 - in_vain * min(max(0.5, seconds / _SAVED), 8.0))

    def _note_gain(self, gain: float) -> None:
        self._balance = min(self._balance + gain, _MOST_CREDIT)
        if self._balance < _MOST_DEBT:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._balance, self._since, self._latest, self._has_seen = _MOST_DEBT / 2, 0, 1, False
        elif self._balance > 0:
            self._next_rest = _REST
