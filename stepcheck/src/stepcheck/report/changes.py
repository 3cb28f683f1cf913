"""The words of a change."""

from stepcheck.values import Change


def sentence(change: Change) -> str:
    """Return what is done to a quantity, in a sentence."""
    return str(change)
