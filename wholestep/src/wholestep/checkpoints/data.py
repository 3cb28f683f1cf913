"""The data of a resumed run: check that they are the same, and move them to the saved position."""

from wholestep.checkpoints.position import (
    CallPosition,
    DataPosition,
    changed_keys,
    other_run,
)
from wholestep.data import Batches, digest_of, layout_of
from wholestep.errors import BatchError, SpecificationError, message


def note(data: DataPosition, batches: Batches) -> None:
    """Record the position of the batches."""
    data.position = batches.position
    data.num_batches = batches.num_batches


def check_goes_on(
    place: CallPosition, data: DataPosition, call: str, batches: Batches, source: str = ""
) -> None:
    """Refuse a call, or data, that cannot resume the run in the middle of its interrupted call.

    Args:
        source: the folder of the run; "" for a snapshot in memory.
    """
    if place.call != call:
        restore = 'trainer.restore(path, only="weights")'
        weights = restore if source else "restore(..., goes_on=False)"
        way = f"{place.call} with the same arguments; for its weights, {weights}."
        raise other_run(source, f"it was trained by {place.call}", call, way)
    differing = differences(data.layout, layout_of(batches))
    num = batches.num_batches_in(data.position[0])
    if not differing and num != data.num_batches:
        differing = [f"{num} batches in an epoch (saved: {data.num_batches})"]
    if differing:
        why = "its data, their order or its batches are not those of this call"
        raise other_run(source, why, "; ".join(differing), "its data, batch size and seed.")
    if batches.is_ready and batches.position not in (data.position, (0, 0)):
        must = (
            "To resume on an iterable, pass it at its first batch; it is advanced to the saved "
            "position."
        )
        received = f"batches at position {batches.position} (saved: {data.position})"
        raise SpecificationError(message(must, received, "open the data anew."))


def check_content(before: dict[str, str], here: dict[str, str], source: str) -> None:
    """Refuse arrays whose digests differ from those of the saved run."""
    if names := changed_keys(before, here):
        received = f"other numbers in {', '.join(names)}"
        way = f'its data; on corrected data, trainer.restore("{source}").'
        raise other_run(source, "its data are not those of this call", received, way)


def differences(before: dict[str, str], here: dict[str, str]) -> list[str]:
    """Describe the differences between two layouts.

    >>> differences({"rows": "8", "order": "a"}, {"rows": "9", "order": "a"})
    ['rows: 9 (saved: 8)']
    >>> differences({"order": "a"}, {"order": "b"})
    ['another order of the rows']
    """
    words = {
        name: f"{name}: {here.get(name, 'none')} (saved: {before.get(name, 'none')})"
        for name in changed_keys(before, here)
    }
    if "order" in words:  # a digest
        words["order"] = "another order of the rows"
    return list(words.values())


def advance_to(data: DataPosition, batches: Batches) -> None:
    """Move the batches to the saved position.

    Raises:
        BatchError: the stream yielded other batches than in the saved run.
    """
    if batches.position == data.position:
        return
    if batches.position != (0, 0):
        batches.seek(*data.position)
        return
    epoch, num = data.position
    if data.state is not None and num:
        batches.restore_stream(data.position, data.state)
        return
    last = batches.run_forward(epoch, num)
    if data.last and last is not None and digest_of(last) != data.last:
        must = "A stream must yield the same batches to a resumed run."
        received = f"another batch before batch {num} of epoch {epoch}, both counted from 0"
        attempt = (
            "seed its random draws, and draw none in a parallel map (num_parallel_calls) of "
            "tf.data; or resume on other batches with trainer.restore(path). "
            "Nothing was updated."
        )
        raise BatchError(message(must, received, attempt))
