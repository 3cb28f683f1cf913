"""`python -m benchmarks.joined [--torch PYTHON]`: a contrastive loss of a batch, whole and cut.

Each child trains two towers on random rows by the InfoNCE loss of the batch, in one process whole
and cut in turn, and prints seconds of an update. `--torch` names a Python with PyTorch and
GradCache (`pip install --no-deps GradCache`), whose figures stand beside ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

BATCH, CUT = 1024, 128
INPUTS, HIDDEN, OUTPUTS = 256, 1024, 128
TEMPERATURE = 0.1
ROUNDS = 7
UPDATES = 5  # in a round
Updates = Callable[[], object]  # trains UPDATES times


def rows() -> list[np.ndarray]:
    """Return the inputs of both towers, (rows, inputs) each."""
    random = np.random.default_rng(0)
    return [random.normal(size=(BATCH, INPUTS)).astype("float32") for _ in range(2)]


def of_wholestep() -> tuple[Updates, Updates]:
    """Return functions that update whole batches, and cut ones."""
    import keras
    from keras import layers, ops

    import wholestep as ws

    def tower() -> keras.Model:
        hidden = [layers.Dense(HIDDEN, "relu"), layers.Dropout(0.1), layers.Dense(HIDDEN, "relu")]
        return keras.Sequential([keras.Input((INPUTS,)), *hidden, layers.Dense(OUTPUTS)])

    def contrast(queries, keys):
        logits = ops.matmul(queries, ops.transpose(keys)) / TEMPERATURE
        labels = ops.arange(ops.shape(logits)[0])
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return ops.mean(losses)

    class InfoNce(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Whole(contrast, model(list(batch), training=training))

    def updates(microbatch_size: int) -> Updates:
        inputs = [keras.Input((INPUTS,)) for _ in range(2)]
        outputs = [layers.UnitNormalization()(tower()(each)) for each in inputs]
        model = keras.Model(inputs, outputs)
        trainer = ws.Trainer(
            model, InfoNce(), optimizer=keras.optimizers.SGD(0.1), microbatch_size=microbatch_size
        )
        data = ws.Batches(tuple(np.tile(each, (UPDATES, 1)) for each in rows()), BATCH)
        return lambda: trainer.fit(data, verbose=0)

    return updates(BATCH), updates(CUT)


def of_torch() -> tuple[Updates, Updates]:
    """Return the same of PyTorch, cut by GradCache."""
    import gradcache
    import gradcache.context_managers
    import torch
    from torch import nn

    # the name by which its modules import each other
    sys.modules["grad_cache"] = gradcache
    sys.modules["grad_cache.context_managers"] = gradcache.context_managers
    from gradcache.grad_cache import GradCache

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    class Unit(nn.Module):
        def forward(self, x):
            return nn.functional.normalize(x, dim=-1)

    def tower() -> nn.Module:
        first = [nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Dropout(0.1)]
        then = [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS), Unit()]
        return nn.Sequential(*first, *then)

    def contrast(queries, keys):
        logits = queries @ keys.T / TEMPERATURE
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    def updates(step_of: Callable) -> Updates:
        towers = [tower(), tower()]
        optimizer = torch.optim.SGD([p for each in towers for p in each.parameters()], 0.1)
        step = step_of(towers)
        inputs = [*map(torch.from_numpy, rows())]

        def train() -> None:
            for _ in range(UPDATES):
                optimizer.zero_grad()
                step(*inputs)
                optimizer.step()

        return train

    def whole(towers: list) -> Callable:
        return lambda q, k: contrast(towers[0](q), towers[1](k)).backward()

    return updates(whole), updates(lambda towers: GradCache(towers, CUT, contrast))


def measured(functions: tuple[Updates, Updates]) -> list[float]:
    """Return the median seconds of an update, whole and cut, of rounds in turn."""
    times: list[list[float]] = [[], []]
    for function in functions:
        function()
    for _ in range(ROUNDS):
        for function, of in zip(functions, times, strict=True):
            since = time.perf_counter()
            function()
            of.append((time.perf_counter() - since) / UPDATES)
    return [*map(statistics.median, times)]


def main() -> None:
    """Measure each library in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joined", description=__doc__)
    parser.add_argument("--torch", help="a Python with torch and gradcache")
    parser.add_argument("--child", choices=["wholestep", "torch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        functions = of_torch() if arguments.child == "torch" else of_wholestep()
        print(json.dumps(measured(functions)))
        return
    children = {
        "wholestep, JAX": (sys.executable, "wholestep", "jax"),
        "wholestep, TensorFlow": (sys.executable, "wholestep", "tensorflow"),
    }
    if arguments.torch:
        children["PyTorch, GradCache"] = (arguments.torch, "torch", "")
    print(f"A batch of {BATCH:,} in microbatches of {CUT}: ms of an update")
    print("| library | whole | cut | speed of the cut |\n|---|---|---|---|")
    for name, (python, child, engine) in children.items():
        whole, cut = _of_child(python, child, engine)
        print(f"| {name} | {1000 * whole:.1f} | {1000 * cut:.1f} | {whole / cut:.2f} |", flush=True)


def _of_child(python: str, child: str, engine: str) -> list[float]:
    command = [python, "-m", "benchmarks.joined", "--child", child]
    environment = os.environ | {"KERAS_BACKEND": engine, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
