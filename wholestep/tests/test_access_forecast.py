"""The number of updates sent ahead: the time saved exceeds that of updates computed in vain."""

import numpy as np
import pytest

from wholestep.ahead import AccessForecast

SHORT = 1e-4
LONG = 1e-3  # seconds of an update


def carry_out(num, is_looked_after, seconds):
    """Return how many dispatches, how many updates in vain, and how many looks were watched for in
    vain.
    """
    looks = AccessForecast()
    done = 0
    dispatches = 0
    in_vain = 0
    while done < num:
        wanted = looks.wanted
        dispatches += 1
        size = min(max(1, wanted), num - done)
        handed = next((i for i in range(1, size + 1) if is_looked_after(done + i)), size)
        done += handed
        looks.note_end(handed, 0 if handed == size else size, seconds)
        in_vain += 0 if handed == size else size
        if wanted and is_looked_after(done):
            looks.note_access()
    return dispatches, in_vain


@pytest.mark.parametrize("period", [2, 7, 50, 200])
def test_who_looks_regularly_is_expected(period):
    dispatches, in_vain = carry_out(5000, lambda update: update % period == 0, SHORT)
    assert dispatches < 1.2 * 5000 / period + 20
    assert in_vain <= 4 * period


def test_a_look_at_the_beginning_does_not_hide_the_habit():
    dispatches, in_vain = carry_out(20_000, lambda update: update % 50 == 1, SHORT)
    assert dispatches < 1000
    assert in_vain < 200


def test_nobody_looks():
    assert carry_out(5000, lambda update: False, SHORT) == (12, 0)


RNG = np.random.default_rng(0)
AT_RANDOM = {p: RNG.random(50_001) < p for p in (0.03, 0.1, 0.3)}
PATTERNS = {
    "after every update": lambda update: True,
    "twice in a row, after every ten": lambda update: update % 10 < 2,
    "twice in a row, after every thirty": lambda update: update % 30 < 2,
    **{f"at random, {p}": lambda update, p=p: AT_RANDOM[p][update] for p in AT_RANDOM},
}


@pytest.mark.parametrize("seconds", [SHORT, LONG])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_who_cannot_be_foretold_costs_little(pattern, seconds):
    num = 50_000
    dispatches, in_vain = carry_out(num, PATTERNS[pattern], seconds)
    cost = dispatches * 150e-6 + (num + in_vain) * seconds
    assert cost < 1.03 * num * (150e-6 + seconds)


def test_a_habit_that_changes_is_learned_anew():
    dispatches, in_vain = carry_out(
        40_000, lambda update: update % (10 if update < 20_000 else 100) == 0, SHORT
    )
    assert dispatches < 1.3 * (2000 + 200)
    assert in_vain < 1000
