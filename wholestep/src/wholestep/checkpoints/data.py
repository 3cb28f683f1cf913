"""The data of a resumed run: check that they are the same, and move them to the saved position."""

from wholestep.checkpoints.place import DataPlace, Place, other_run, way_out
from wholestep.data import Batches, digest_of, layout_of
from wholestep.errors import BatchError, SpecificationError, message


def note(data: DataPlace, batches: Batches) -> None:
    """Record the position of the batches."""
    data.position = batches.position
    data.num_batches = batches.num_batches


def check_goes_on(
    place: Place, data: DataPlace, call: str, batches: Batches, source: str = ""
) -> None:
    """Refuse a call, or data, that cannot resume the run in the middle of its interrupted call.

    Args:
        source: the folder of the run; "" for a snapshot in memory.
    """
    if place.call != call:
        must = other_run(source, f"it was trained by {place.call}")
        weights = (
            'trainer.restore(path, only="weights")' if source else "restore(..., goes_on=False)"
        )
        attempt = way_out(
            source, f"{place.call} with the same arguments; for its weights, {weights}."
        )
        raise SpecificationError(message(must, call, attempt))
    here = layout_of(batches)
    differing = unlike(data.layout, here)
    if not differing and batches.num_batches != data.num_batches:
        differing = [f"{batches.num_batches} batches in an epoch (saved: {data.num_batches})"]
    if differing:
        must = other_run(source, "its data, their order or its batches are not those of this call")
        attempt = way_out(source, "its data, batch size and seed.")
        raise SpecificationError(message(must, "; ".join(differing), attempt))
    if batches.is_ready and batches.position not in (data.position, (0, 0)):
        must = (
            "To resume on an iterable, pass it at its first batch; it is advanced to the saved "
            "position."
        )
        received = f"batches at position {batches.position} (saved: {data.position})"
        raise SpecificationError(message(must, received, "open the data anew."))


def check_content(before: dict[str, str], here: dict[str, str], source: str) -> None:
    """Refuse arrays whose digests differ from those of the saved run."""
    if names := [name for name in {**before, **here} if before.get(name) != here.get(name)]:
        must = other_run(source, "its data are not those of this call")
        attempt = way_out(source, "its data; on corrected data, ") + f'trainer.restore("{source}").'
        raise SpecificationError(message(must, f"other numbers in {', '.join(names)}", attempt))


def unlike(before: dict[str, str], here: dict[str, str]) -> list[str]:
    """Describe the differences between two layouts.

    >>> unlike({"rows": "8", "order": "a"}, {"rows": "9", "order": "a"})
    ['rows: 9 (saved: 8)']
    >>> unlike({"order": "a"}, {"order": "b"})
    ['another order of the rows']
    """
    names = [name for name in {**before, **here} if before.get(name) != here.get(name)]
    told = []
    for name in names:
        one = here.get(name, "none")
        two = before.get(name, "none")
        is_digest = name == "order"
        told.append("another order of the rows" if is_digest else f"{name}: {one} (saved: {two})")
    return told


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
        batches.restore_stream(data.position, data.state)
        return
    last = batches.run_forward(*data.position)
    if data.last and last is not None and digest_of(last) != data.last:
        must = "A stream must yield the same batches to a resumed run."
        received = f"another batch before batch {data.position[1]} of epoch {data.position[0]}"
        attempt = (
            "seed its random draws; or resume on other batches with trainer.restore(path). "
            "Nothing was updated."
        )
        raise BatchError(message(must, received, attempt))
