"""The data of a resumed run: check that they are the same, and move them to the saved position."""

from wholestep.checkpoints.place import DataPlace, Place
from wholestep.data import Batches, digest_of, layout_of
from wholestep.errors import BatchError, SpecificationError, message


def note(data: DataPlace, batches: Batches) -> None:
    """Record the position of the batches."""
    data.position, data.num_batches = batches.position, batches.num_batches


def check_goes_on(place: Place, data: DataPlace, call: str, batches: Batches) -> None:
    """Refuse a call, or data, that cannot resume the run in the middle of its interrupted call."""
    if place.call != call:
        must = f"A run that stopped inside of {place.call} must resume with {place.call}."
        attempt = f"call {place.call} with the same arguments; or begin anew, in another folder, after "
        attempt += 'restore(snapshot, goes_on=False) or trainer.restore(path, only="weights").'
        raise SpecificationError(message(must, call, attempt))
    here = layout_of(batches)
    differing = unlike(data.layout, here)
    if not differing and batches.num_batches != data.num_batches:
        differing = [f"{batches.num_batches} batches an epoch, {data.num_batches} before"]
    if differing:
        must = "A run must resume on the same data, in the same order, and with the same batching."
        attempt = "pass the same data, batch size and seed."
        raise SpecificationError(message(must, "; ".join(differing), attempt))
    if batches.is_ready and batches.position not in (data.position, (0, 0)):
        must = "To resume on an iterable, pass it at its first batch; it is advanced to the saved position."
        received = f"batches at position {batches.position} (saved: {data.position})"
        raise SpecificationError(message(must, received, "open the data anew."))


def unlike(before: dict[str, str], here: dict[str, str]) -> list[str]:
    """Describe the differences between two descriptions.

    >>> unlike({"rows": "8", "order": "a"}, {"rows": "9", "order": "a"})
    ['rows: 9, and 8 before']
    """
    names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
    return [f"{name}: {here.get(name, 'none')}, and {before.get(name, 'none')} before" for name in names]


def go_to(data: DataPlace, batches: Batches) -> None:
    """Move the batches to the saved position.

    Raises:
        BatchError: the stream yielded other batches than in the saved run.
    """
    if batches.position == data.position:
        return
    if batches.position != (0, 0):
        batches.seek(*data.position)
        return
    if data.state is not None and data.position[1]:
        batches.go_on(data.position, data.state)
        return
    last = batches.run_forward(*data.position)
    if data.last and last is not None and digest_of(last) != data.last:
        must = "A stream must yield the same batches to a resumed run."
        received = f"another batch before batch {data.position[1]} of epoch {data.position[0]}"
        attempt = "seed its random draws; or resume on other batches with trainer.restore(path). Nothing was updated."
        raise BatchError(message(must, received, attempt))
