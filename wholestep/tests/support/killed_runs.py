"""The processes of tests/checkpoints/test_killed.py: fits that save after every update, each
described by a line of JSON.

`killed_runs.py JSON` runs a single fit. `killed_runs.py` alone forks a process for each line of its
input: Keras is imported once.
"""

import json
import os
import random
import signal
import sys
import time

import conftest  # the engine is set up as in the tests, or other bits would be no wonder
import keras
import numpy as np
from runs import BATCHES, GROWING, NO_XLA, SIZE, X, Y, leaves, made, small

import wholestep as ws

if hasattr(conftest, "COMPILED"):  # a process that is killed may leave half a file in it
    conftest.jax.config.update("jax_compilation_cache_dir", None)
MODELS = {"small": small, "made": made}
SIZES = {"arrays": SIZE, "growing": GROWING}


class Rows(keras.utils.PyDataset):
    """The rows in batches, which two processes load."""

    def __init__(self):
        super().__init__(workers=2, use_multiprocessing=True)

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        rows = slice(SIZE * i, SIZE * (i + 1))
        return X[rows], Y[rows]


class Slow(keras.callbacks.Callback):
    """Says that training has begun, and lets an update take some seconds."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        print("update", int(self.model.optimizer.iterations), flush=True)
        time.sleep(self.seconds)


def train(model="small", data="arrays", seconds=0.0, checkpoints=None, every=1):
    """Return the weights and losses of three epochs."""
    random.seed(0)
    np.random.seed(0)
    trainer = ws.Trainer(MODELS[model](), **NO_XLA)
    inputs = (Rows(),) if data == "workers" else (X, Y)
    how = {"batch_size": SIZES[data]} if data in SIZES else {}
    saves = None if checkpoints is None else ws.Checkpoints(checkpoints, every_steps=every, keep=3)
    told = {"epochs": 3, "verbose": 0, "callbacks": [Slow(seconds)], "checkpoints": saves}
    history = trainer.fit(*inputs, **how, **told).history
    return [*leaves(trainer.model), np.array(history["loss"])]


def kill_at(call, num):
    """Let a call of a function of `os` kill this process, the `num`-th one."""
    real = getattr(os, call)
    left = [num]

    def kills(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, call, kills)


def main(line):
    how = json.loads(line)
    if "kill_at" in how:
        kill_at(*how.pop("kill_at"))
    out = how.pop("out")
    np.savez(out, *train(**how))


if __name__ == "__main__":
    # Keras' own imports tensorflow.
    keras.utils.set_random_seed = lambda seed: (random.seed(seed), np.random.seed(seed))
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        for line in sys.stdin:
            if (pid := os.fork()) == 0:
                print("pid", os.getpid(), flush=True)
                main(line)
                os._exit(0)
            print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
