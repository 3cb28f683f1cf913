"""The time from the call of `fit` to the end of the first update, in this fresh process."""

import gc
import time
from typing import Any

import keras

import wholestep as ws
from benchmarks.works import WORKS


class _First(keras.callbacks.Callback):
    """Notes when the first update is done. Reads its loss, which waits for the device."""

    def __init__(self):
        super().__init__()
        self.at: float | None = None

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.at is None and logs:
            float(logs["loss"])
            self.at = time.perf_counter()
            self.model.stop_training = True


def measure(work: str, who: str, programs: str = "") -> float:
    """Return the seconds that `who` ("wholestep" or "Keras fit") takes on this work.

    `programs`: a folder in which JAX keeps what it compiles.
    """
    if programs:
        import jax

        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    chosen = WORKS[work]
    model = chosen.model()
    data = chosen.data(quick=False)
    first = _First()
    fit: Any = ws.Trainer(model).fit if who == "wholestep" else model.fit
    gc.collect()  # or chance decides who has to search all the objects of the imports for garbage
    begin = time.perf_counter()
    fit(**data, batch_size=chosen.batch_size, epochs=1, verbose=0, callbacks=[first])
    assert first.at is not None
    return first.at - begin
