"""Run: where a training stands, and the one loop through which everything moves on."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from wholestep.data.batches import Batches
from wholestep.data.block import Block
from wholestep.data.feed import Feed
from wholestep.repeat import EPOCH
from wholestep.state import State, Variables

Sent = TypeVar("Sent", covariant=True)


@dataclass
class Run:
    """Where a training stands.

    Args:
        state: what the next update spends; None before the first.
        number: the number of the last update: the optimizer's `iterations`, and how many updates were skipped.
        num_skipped: the updates that were left out because they were not finite.
        begins: how the next update begins, see `wholestep.repeat.span`.
        variables: whose values the state holds; another executor's state is of no use.
        epochs: how many epochs of data have begun: the next call takes the order of another one.
    """

    state: State | None = None
    number: int = 0
    num_skipped: int = 0
    begins: int = EPOCH
    variables: Variables | None = None
    epochs: int = 0

    @contextmanager
    def counting(self, batches: Batches) -> Iterator[None]:
        """Count the epochs that are begun in here."""
        try:
            yield
        finally:
            epoch, step = batches.position
            self.epochs = max(self.epochs, epoch + (step > 0))


class Sends(Protocol[Sent]):
    """Whatever sends blocks to the device: an executor's updates, or an evaluation."""

    def send(self, run: Run, feed: Feed, block: Block) -> Sent:
        """Send a block; return what will tell of it."""


def updates(
    line: Sends[Sent],
    run: Run,
    feed: Feed,
    num: int | None,
    size: Callable[[], int],
    *,
    once: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Generator[Sent, None, None]:
    """Carry out the updates that a feed yields; yield what tells of each block as soon as the block is sent.

    An evaluation's batches, which update nothing, go the same way. Between any two blocks the run may be looked at.

    Args:
        num: how many updates (None: to the end of the epoch).
        size: how many may go in the next dispatch.
        once: whether they end with the epoch in any case.
        before: called before a block is sent.
    """
    for block in feed.blocks(num, size, once=once):
        before()
        yield line.send(run, feed, block)
