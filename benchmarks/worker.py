"""A process of `benchmarks.processes`: trains on its own core, and writes down how long that took.

worker.py WORK QUICK FILE
"""

import json
import os
import sys
import time
from pathlib import Path

ME = int(os.environ.get("WHOLESTEP_PROCESS_ID", "0"))
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[ME % len(CORES)]})

import wholestep as ws  # noqa: E402
from benchmarks.works import WORKS  # noqa: E402

_ROUNDS = 3


def main(name: str, is_quick: bool, path: Path) -> None:
    """Train one update, one epoch, and then the epochs that are timed."""
    work = WORKS[name]
    model = work.model()
    data = work.data(quick=is_quick)
    trainer = ws.Trainer(model)
    options = {"batch_size": work.batch_size, "verbose": 0}
    trainer.fit(**data, **options, steps_per_epoch=1)
    at = time.time()
    times = []
    trainer.fit(**data, **options)
    for _ in range(1 if is_quick else _ROUNDS):
        begin = time.perf_counter()
        trainer.fit(**data, **options)
        times.append(time.perf_counter() - begin)
    if ME == 0:
        path.write_text(
            json.dumps({"at": at, "epoch": times, "updates": len(data["y"]) // work.batch_size})
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", Path(sys.argv[3]))
