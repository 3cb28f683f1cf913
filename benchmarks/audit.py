"""What an audit costs against the loop that it watches: seconds, memory, and how much slower the
loop runs.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import stepcheck
from benchmarks.works import same_start

_UPDATES = 30
_BATCH = 64
_PAGE = 4096


def measure(kind: str, rounds: int, quick: bool) -> dict[str, Any]:
    """
    Return seconds of the loop by itself, under the hooks and with the judgement, by contestant; and
    megabytes.

    Args:
        kind: "right", "wrong" (labels are broadcast) or "large" (wrong, of 2.5e7 parameters).
    """
    times: dict[str, list[float]] = {"bare": [], "hooks": [], "audited": []}
    peaks = []
    for _ in range(rounds):
        model, data, loss = _work(kind, quick)
        times["bare"].append(_seconds(lambda: _train(model, loss, data)))  # noqa: B023
        model, data, loss = _work(kind, quick)
        with _Peak() as peak:
            begin = time.perf_counter()
            with stepcheck.watch(model, data=data, loss="mse") as report:
                _train(model, loss, data)
            times["hooks"].append(time.perf_counter() - begin)
            found = [finding.fault.id for finding in report.findings]
            times["audited"].append(time.perf_counter() - begin)
        assert found == ([] if kind == "right" else ["gradient.broadcast"]), found
        peaks.append(peak.megabytes)
    num = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return {"times": times, "peak": peaks, "model": 4 * num / 1e6}


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class _Peak:
    """How many megabytes this process grows inside of a `with`, looked at a hundred times a
    second.
    """

    def __enter__(self) -> "_Peak":
        self._ended, self._before, self.megabytes = threading.Event(), _resident(), 0.0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.megabytes = max(self.megabytes, (_resident() - self._before) / 1e6)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _work(kind: str, quick: bool) -> tuple[keras.Model, tuple, Callable]:
    same_start()
    width, sizes = (
        (64, (32,)) if quick else (256, (256, 128)) if kind != "large" else (3000, (5000, 2000))
    )
    model = keras.Sequential(
        [keras.Input((width,)), *(keras.layers.Dense(size, "relu") for size in sizes)]
    )
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    draw = np.random.default_rng(0)
    num = 10 * _BATCH
    x = draw.normal(size=(num, width)).astype("float32")
    y = draw.normal(size=num).astype("float32")
    right = kind == "right"
    return (
        model,
        (x, y),
        lambda b, output: keras.ops.mean((output - (b[:, None] if right else b)) ** 2),
    )


def _train(model: keras.Model, loss: Callable, data: tuple) -> None:
    step, wait = {"jax": _jax_step, "tensorflow": _tape_step}[keras.backend.backend()](model, loss)
    x, y = data
    for i in range(_UPDATES):
        if i % 10 == 0:
            order = np.random.default_rng(i).permutation(len(x)).reshape(10, _BATCH)
        step(x[order[i % 10]], y[order[i % 10]])
    wait()


def _tape_step(model: keras.Model, loss: Callable) -> tuple[Callable, Callable]:
    import tensorflow as tf

    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            value = loss(b, model(a, training=True))
        grads = tape.gradient(value, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    return lambda a, b: step(tf.constant(a), tf.constant(b)), lambda: None


def _jax_step(model: keras.Model, loss: Callable) -> tuple[Callable, Callable]:
    import jax

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    state = [[v.value for v in group] for group in (model.trainable_variables, optimizer.variables)]

    def value_at(tv, a, b):
        output, _ = model.stateless_call(tv, [], a, training=True)
        return loss(b, output)

    @jax.jit
    def update(tv, ov, a, b):
        return optimizer.stateless_apply(ov, jax.grad(value_at)(tv, a, b), tv)

    def step(a, b):
        state[:] = update(*state, a, b)

    return step, lambda: jax.block_until_ready(state)
