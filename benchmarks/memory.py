"""How much this fresh process grows while a wide model is trained on large batches."""

import resource

import wholestep as ws
from benchmarks.works import WORKS

_KIB = 1024


def measure(parts: int | None, quick: bool) -> dict:
    """
    Return bytes: the growth of the peak resident memory, and what the program says it needs (None
    if it cannot).

    Args:
        parts: microbatches in an update; None for Keras fit.
    """
    work = WORKS["wide"]
    model = work.model()
    data = work.data(quick=quick)
    before = _peak()
    if parts is None:
        model.fit(**data, batch_size=work.batch_size, verbose=0)
        return {"peak": _peak() - before, "program": None}
    trainer = ws.Trainer(model, microbatch_size=work.batch_size // parts)
    trainer.fit(**data, batch_size=work.batch_size, verbose=0)
    (program,) = trainer.executor.planner.programs.values()
    return {"peak": _peak() - before, "program": program.memory}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
