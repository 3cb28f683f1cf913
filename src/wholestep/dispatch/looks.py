"""Forecast of the next access to the training state: the number of updates worth sending at once."""

from collections import deque

_MOST_DEBT, _MOST_CREDIT = -64.0, 256.0  # dispatches saved, minus the cost of discarded updates
_REST, _LONGEST_REST = 64, 4096  # updates
_LOOK = 0.5  # the cost of watching for an access where nothing was sent ahead
_SAVED = 150e-6  # extra seconds of an update that is sent alone (docs/notes/log.md)


class Looks:
    """Forecasts the number of updates before the next access to a variable.

    It is the shortest recent distance between accesses; without accesses, it doubles. Where accesses cannot be
    forecast and cost more than was saved, updates are sent singly for a while, each time for longer.

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
        self._since = 0  # updates since the last access
        self._has_seen = False  # whether all accesses since the last one were seen, so that their distance is known
        self._gaps: deque[int] = deque(maxlen=4)  # updates between accesses
        self._latest = 1
        self._balance = 0.0
        self._rest = 0  # updates still to be sent singly
        self._next_rest = _REST

    @property
    def wanted(self) -> int:
        """The number of updates worth sending at once; 0 to send them singly, without a watch."""
        if self._rest > 0:
            return 0
        to_look = min(self._gaps) - self._since if self._gaps and self._has_seen else 0
        return to_look if to_look > 0 else 2 * self._latest

    def note_look(self) -> None:
        """Record an access after all recorded updates."""
        if self._has_seen:
            self._gaps.append(self._since)
        self._since, self._has_seen = 0, True
        self._note_gain(-_LOOK)

    def note_end(self, num: int, in_vain: int, seconds: float) -> None:
        """Record a finished dispatch of `num` useful updates; `in_vain` updates were computed again or discarded.

        Args:
            seconds: the time of an update.
        """
        if self._rest > 0:
            self._rest = max(0, self._rest - num)  # accesses are not seen meanwhile
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
