"""The data of a run that goes on: whether they are those that it had, and the way to where they stood."""

from wholestep.checkpoints.place import DataPlace, Place
from wholestep.data.batches import Batches
from wholestep.data.facts import digest_of, layout_of
from wholestep.errors import BatchError, SpecificationError, message


def note(data: DataPlace, batches: Batches) -> None:
    """Take note of where the batches stand."""
    data.position, data.num_batches = batches.position, batches.num_batches


def check_goes_on(place: Place, data: DataPlace, call: str, batches: Batches) -> None:
    """Refuse a call, or data, with which a run cannot go on in the middle of the call that was left.

    Raises:
        SpecificationError: as said.
    """
    if place.call != call:
        must = f"A run that was left inside of {place.call} goes on with {place.call}."
        attempt = (
            f"call {place.call} with the arguments it had; or begin anew, in another folder, after restore(snapshot, "
        )
        attempt += 'goes_on=False) or trainer.restore(path, only="weights").'
        raise SpecificationError(message(must, call, attempt))
    here = layout_of(batches)
    differing = unlike(data.layout, here)
    if not differing and batches.num_batches != data.num_batches:
        differing = [f"{batches.num_batches} batches an epoch, {data.num_batches} before"]
    if differing:
        must = "A run goes on with the data that it had, in the same order and in batches by the same rule."
        attempt = "pass the same data, batch size and seed."
        raise SpecificationError(message(must, "; ".join(differing), attempt))
    if batches.is_ready and batches.position not in (data.position, (0, 0)):
        must = "Ready-made batches run forward to where they were from their beginning."
        received = f"batches that stand at {batches.position}, to go on at {data.position}"
        raise SpecificationError(message(must, received, "open the data anew."))


def unlike(before: dict[str, str], here: dict[str, str]) -> list[str]:
    """Return what two descriptions say differently, in words.

    >>> unlike({"rows": "8", "order": "a"}, {"rows": "9", "order": "a"})
    ['rows: 9, and 8 before']
    """
    names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
    return [f"{name}: {here.get(name, 'none')}, and {before.get(name, 'none')} before" for name in names]


def go_to(data: DataPlace, batches: Batches) -> None:
    """Let the batches stand where they were; a later call goes on by itself.

    Raises:
        BatchError: a stream gave other batches on the way than it had given before.
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
        must = "A stream gives a run that goes on the batches that it gave before."
        received = f"another batch before batch {data.position[1]} of epoch {data.position[0]}"
        attempt = "seed what it draws; trainer.restore(path) goes on with other batches. Nothing was updated."
        raise BatchError(message(must, received, attempt))
