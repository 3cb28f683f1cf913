"""Feeds bring batches to the device: as row numbers of resident data, or loaded as they are needed."""

from wholestep import tree
from wholestep.data.batches import Batches
from wholestep.data.block import Check, Known, Plan
from wholestep.data.loaded import Loaded
from wholestep.data.resident import Resident
from wholestep.engines import Devices

Feed = Resident | Loaded


def open_feed(
    devices: Devices, batches: Batches, limit: int, plan: Plan, check: Check, known: Known | None = None
) -> Feed:
    """Return a feed; arrays of at most `limit` bytes become resident."""
    size = tree.num_bytes(batches.arrays)
    reasons = {
        "they come ready-made": batches.is_ready,
        "of a few shapes": bool(batches.shapes),
        "rows come one by one": batches.arrays is None,
        f"arrays of {size / 2**20:.0f} MiB may not stay, beyond {limit / 2**20:.0f}": size > limit,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return Resident(devices, batches, plan, check) if why is None else Loaded(devices, batches, plan, check, known, why)
