"""The feed of batches that are loaded as they are needed, and a few ahead."""

from collections.abc import Callable, Iterator

import numpy as np

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.block import Batch, Block, Check, Known, Plan, Planned, Table, share_out, stage
from wholestep.data.ready import BatchStream
from wholestep.data.stack import Drawn, stack, stacked_rows
from wholestep.engines import Devices
from wholestep.errors import BatchError, message
from wholestep.safety import uninterrupted
from wholestep.tree import Tree

_UNDER_WAY = 5  # blocks whose updates may be discarded, so that their batches are needed again
_PART = 16  # 1/16 of the updates that fit a dispatch are stacked: enough to hide its cost


class Loaded:
    """Batches that are loaded while the device computes earlier ones; a block stacks batches of one program.

    With several processes, each loads only the rows of its own replicas, as soon as the plan is known.

    Args:
        known: tables and batch sizes of earlier feeds; updated.
        why: the reason why the data do not stay on the device.
    """

    def __init__(
        self, devices: Devices, batches: Batches, plan: Plan, check: Check, known: Known | None = None, why: str = ""
    ):
        self.batches = batches
        self.where = f"Batches are loaded as they are needed{why and f' ({why})'}."
        self._devices = devices
        self._plan = plan
        self._check = check
        self._programs: dict[tuple[int, int], Planned] = {}  # by the rows of an update, full and real
        self._known = known or Known({}, {})
        self._largest = dict(self._known.largest)  # counts drawn batches; `known` counts sent ones
        self._is_open = False
        self._drawn: Drawn | None = None

    def blocks(
        self, num: int | None, size: Callable[[], int], *, once: bool = False, ahead: Callable[[], int] | None = None
    ) -> Iterator[Block]:
        """Yield blocks of at most size() updates, and a fraction of a large size(): a block waits for its last batch.

        The consumer of a block moves `batches.position` to the end of the block.

        Args:
            num: the number of updates in all (None: to the end of the epoch).
            once: whether the blocks end with the epoch in any case.
            ahead: if the state may be read after each block, returns the number of updates to send at once anyway:
                that many batches are drawn, unless a batch may depend on the updates before it.
        """
        self._end: tuple[int, int] | None = None  # the position after the end of a stream
        source, drawn = self.batches.source, Drawn(self._load(num, once))
        self._drawn = drawn
        looks = ahead is not None and not (isinstance(source, BatchStream) and source.may_depend_on_the_loop)
        self._is_open = True
        try:
            while drawn.has(0):
                program = self._planned(drawn[0])
                early = ahead() if ahead is not None and looks else 1
                most = min(program.num_stacked, max(1, size() // _PART, early))
                block = self.block(program, self._alike(drawn, program, most))._replace(looks=looks)
                yield from [block] if ahead is None else _one_by_one(block, size)
            self.batches.position = max(self.batches.position, self._end or self.batches.position)
        finally:
            self._is_open = False
            with uninterrupted():
                self._put_back(drawn.kept)

    def note_sent(self, block: Block) -> None:
        """Record that a block was sent; if it is one of several parts, draw the next batches meanwhile."""
        for batch in block.batches:
            if batch.kind:
                self._known.largest[batch.kind] = max(self._known.largest.get(batch.kind, 0), batch.full)
        if block.looks and block.first == 0 and block.follow and self._drawn is not None:
            self._drawn.draw(block.num + block.follow)

    def in_hand(self, full: Callable[[Tree], int]) -> Block:
        """Return the block of a single batch; `full` returns the number of rows up to which it may be padded."""
        host, after = self.batches.take((0, 0))
        batch = self._batch(host, None, (0, 0), after, full(host))
        return self.block(self._planned(batch), [batch])

    def go_back(self, block: Block, done: int) -> None:
        """Move the position to after the first `done` updates of a block: the others were not applied."""
        self.batches.position = block.start[0], block.start[1] + done
        if not self._is_open:
            self._put_back([*block.batches])

    def _planned(self, batch: Batch) -> Planned:
        """Return the program of an update, after checking its batch."""
        program = self._plan(batch)
        self._programs[batch.full, batch.num_rows] = program
        self._check(batch)
        return program

    def _alike(self, drawn: Drawn, program: Planned, most: int) -> list[Batch]:
        """Return the next batch, which is planned, and the batches that fit its block, at most `most` in all."""
        alike = [drawn[0]]
        while len(alike) < most and drawn.has(len(alike)) and self._follows(drawn[len(alike)], alike[-1], program):
            alike.append(drawn[len(alike)])
        drawn.leave(len(alike), keep=_UNDER_WAY * most)
        return alike

    def _follows(self, batch: Batch, last: Batch, program: Planned) -> bool:
        """Whether a batch directly follows the last in its epoch, with as many rows and the same program."""
        if batch.start != last.end or batch.start[0] != last.start[0] or batch.num_rows != last.num_rows:
            return False
        if batch.signature != last.signature:  # planning it may change the state that this block uses
            return False
        try:
            return self._planned(batch) is program
        except Exception:  # raised again when the batch comes first in its block, after all earlier updates
            return False

    def block(self, program: Planned, batches: list[Batch]) -> Block:
        """Return the block of batches of one program: padded, and placed for the program."""
        first, cut = batches[0], program.cut
        whole = [b.padded(cut.rows) for b in batches] if self._devices.num_replicas == 1 else batches
        room, key = program.num_stacked, (program.length, cut, first.num_rows)
        if room > 1:
            data = stack(self._devices, whole, room)
        else:
            data, rows = stage(self._devices, whole[0], cut)
        if key not in self._known.tables:
            rows = stacked_rows(whole[0], cut, room) if room > 1 else rows[None]
            named = np.zeros((program.length, rows.shape[1]), np.int32)
            named[: len(rows)], counts = rows, np.full((program.length,), first.num_rows, np.int32)
            self._known.tables[key] = Table(named, counts, self._devices.place((named, counts)))
        ends = first.start, batches[-1].end
        return Block(program, data, self._known.tables[key], 0, len(batches), tuple(batches), *ends)

    def _put_back(self, loaded: list[Batch]) -> None:
        """Keep ready-made batches that were not used for the next call; others can be loaded again."""
        batches = self.batches
        unused = [batch for batch in loaded if batch.start >= batches.position]
        batches.unused = unused + batches.unused if batches.is_ready else []

    def _load(self, num: int | None, once: bool) -> Iterator[Batch]:
        batches, done, position = self.batches, 0, self.batches.position
        epoch = position[0]
        while batches.unused and done != num:
            batch = batches.unused.pop(0)
            self._largest[batch.kind] = max(self._largest.get(batch.kind, 0), batch.full)
            done, position = done + 1, batch.end
            yield batch
        ends = once or num is None
        while done != num and (not ends or position[0] == epoch):
            try:
                own = self._own(position)
                host, after = batches.take(position, slice(None) if own is None else own)
                batch = self._batch(host, own, position, after)
            except BatchError as error:
                raise error.at(*position) from error.__cause__
            except StopIteration:
                assert isinstance(batches.source, BatchStream)
                self._end = (position[0] + 1, 0)
                if ends or not batches.source.begins_again or position[1] == 0:
                    return
                position = self._end
                continue
            done += 1
            yield batch
            position = after

    def _own(self, position: tuple[int, int]) -> np.ndarray | None:
        """Return which rows of a batch this process must load; None for all."""
        if len(self._devices.local_replicas) == self._devices.num_replicas or self.batches.is_ready:
            return None
        sampler = self.batches.sampler
        count = len(sampler.ids(*position))
        program = self._programs.get((sampler.full_size(*position), count))
        if program is None:
            return None
        return np.unique(share_out(program.cut, self._devices.num_replicas)[0][self._devices.local_replicas] % count)

    def _batch(
        self, host: Tree, own: np.ndarray | None, start: tuple[int, int], end: tuple[int, int], full: int | None = None
    ) -> Batch:
        batches = self.batches
        ids = None if batches.is_ready else batches.sampler.ids(*start)
        count = tree.num_rows(host) if ids is None else len(ids)
        if count == 0:
            raise BatchError(message("A batch must have at least one row.", "0 rows", "leave empty batches out."))
        kind = ""
        if full is None and batches.is_ready:
            kind = str([tuple(leaf.shape[1:]) for leaf in tree.leaves(host)])
            full = self._largest[kind] = max(self._largest.get(kind, 0), count)
        elif full is None:
            full = batches.sampler.full_size(*start)
        rows = np.arange(count, dtype=np.int32)
        return Batch(host, None, rows, full, ids, own, start, end, batches.stream_state, kind)


def _one_by_one(block: Block, size: Callable[[], int]) -> Iterator[Block]:
    """Yield the updates of a block, at most size() at a time; each part says how many follow it."""
    done = 0
    while done < block.num:
        batches = block.batches[done : done + size()]
        part = block._replace(first=done, num=len(batches), batches=batches)
        done += part.num
        yield part._replace(start=batches[0].start, end=batches[-1].end, follow=block.num - done)
