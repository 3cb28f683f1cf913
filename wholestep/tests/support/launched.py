"""The script of the processes of tests/processes/test_launch.py.

`wholestep launch -n N tests/support/launched.py "WHAT, WHAT" [FOLDER]` runs it.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import jax
import keras
import numpy as np
from exact import build, data, integers, num_rows_of, snapshot

import wholestep as ws
from wholestep.processes import group

ME = jax.process_index()
FAULT_AFTER = 3  # updates
CASES = [
    ("none", "l2", "adam"),
    ("masks", "none", "adamw, clip, ema"),
    ("weighted mean", "l2", "loss scale"),
]


def digest(values):
    return {k: zlib.crc32(np.ascontiguousarray(v).tobytes()) for k, v in values.items()}


class Items:
    """Counted rows, loaded one after the other."""

    def __init__(self, *columns):
        self.columns, self.loaded = columns, set()

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, i):
        self.loaded.add(i)
        return tuple(column[i] for column in self.columns)


def one_update(case, size, short=False, loaded=False):
    """Return digests of all that an update changed and said; `short`: of the epoch's last batch,
    half as long.
    """
    num_rows = num_rows_of(case)
    keras.utils.clear_session()
    model = build(*case)
    batch = data(case[0], num_rows)[0]
    if short:
        batch = keras.tree.map_structure(
            lambda *parts: np.concatenate(parts), batch, data(case[0], num_rows // 2)[0]
        )
    batches = ws.Batches(Items(*batch) if loaded else batch, num_rows, shuffle=False)
    batches.seek(0, 1 if short else 0)
    (step,) = ws.Trainer(model, microbatch_size=size).steps(batches)
    return digest(snapshot(model) | step.logs | {"own loss": step.loss})


def all_cases(many=False):
    """Return the digests of every case under a separate plan; `many`: under every plan."""
    plans = [("auto", False, False), (6, False, True), (6, True, True)]
    pairs = itertools.product(CASES, plans) if many else zip(CASES, plans, strict=True)
    return {str((case, *plan)): one_update(case, *plan) for case, plan in pairs} | {
        "dropout": with_dropout(),
        "rows together": with_rows_together(),
    }


def with_dropout():
    """Return the digest of an update of whole numbers that drops half of them."""
    keras.utils.clear_session()
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    for i, variable in enumerate(model.trainable_weights):
        variable.assign(integers(*variable.shape, seed=i))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    batches = ws.Batches((integers(16, 4, seed=1), integers(16, 4, seed=2)), 16, shuffle=False)
    (step,) = ws.Trainer(model, microbatch_size=6).steps(batches)
    return digest(snapshot(model) | {"own loss": step.loss})


class Together(ws.Objective):
    """The squared products of all pairs of rows."""

    def __call__(self, model, batch, training):
        return ws.Whole(_products, (model(batch[0], training=training), batch[1]))


def _products(outputs, labels):
    return keras.ops.sum(keras.ops.matmul(outputs, keras.ops.transpose(labels)) ** 2) / 1024


def with_rows_together():
    """Return the digest of an update of whole numbers by a loss in which rows meet."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    for i, variable in enumerate(model.trainable_weights):
        variable.assign(integers(*variable.shape, seed=i))
    batches = ws.Batches((integers(16, 4, seed=1), integers(16, 4, seed=2)), 16, shuffle=False)
    trainer = ws.Trainer(model, Together(), optimizer=keras.optimizers.SGD(0.5), microbatch_size=6)
    (step,) = trainer.steps(batches)
    return digest({v.path: np.asarray(v) for v in model.variables} | {"own loss": step.loss})


def rows_loaded():
    """Return how many of 64 rows this process loads in an epoch, once it is known how batches are
    cut.
    """
    keras.utils.clear_session()
    x = np.ones((64, 4), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    items = Items(x, x[:, :1])
    trainer = ws.Trainer(model)
    for step in trainer.steps(ws.Batches(items, 16, seed=1), epochs=2):
        if (step.epoch, step.batch) == (0, 3):
            items.loaded.clear()
    return len(items.loaded)


class Line(ws.Objective):
    def __call__(self, model, batch, training):
        x = keras.ops.cast(batch["x"], "float32")
        return ws.Mean((model(x[..., None], training=training)[..., 0] - 1.0) ** 2, x > 0)


def losses_in_buckets():
    """Return the losses of two epochs of two shapes with as many rows, cut into microbatches."""
    keras.utils.clear_session()
    lengths = [9, 10] * 12
    rows = [{"x": (i * i + np.arange(length) * i) % 7 + 1} for i, length in enumerate(lengths)]
    model = keras.Sequential(
        [keras.Input((None, 1)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    trainer = ws.Trainer(model, Line(), optimizer=keras.optimizers.SGD(0.01), microbatch_size=2)
    batches = ws.Batches(rows, tokens=40, length=lengths, boundaries=[9, 10], seed=1)
    assert {size for size, _ in batches.shapes} == {4}
    return [round(step.loss, 4) for step in trainer.steps(batches, epochs=2)]


def whole_runs():
    """Return what two calls of fit, a loop left early, an evaluation and a prediction say and leave
    behind.
    """
    keras.utils.clear_session()
    random.seed(5)  # from which Keras draws the seeds of weights; its own way imports tensorflow
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 6)).astype("float32")
    y = rng.integers(0, 3, 50)
    layers = [
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, "softmax"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    trainer = ws.Trainer(model)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(model.get_weights()[0].sum())
    )
    told = {"validation_data": (x[:7], y[:7]), "batch_size": 16, "verbose": 0}
    said = [
        trainer.fit(x, y, epochs=2, **told).history,
        trainer.fit(x, y, **told, callbacks=[look]).history,
    ]
    batches = ws.Batches(Items(x, y), 16, seed=2)
    for _ in range(2):
        for step in trainer.steps(batches):
            said.append(step.loss)
            if step.batch == 1:
                break
    said += [batches.position, trainer.evaluate(x, y, verbose=0), trainer.predict(x[:5], verbose=0)]
    leaves = [*keras.tree.flatten(said), *seen, *(v.numpy() for v in model.variables)]
    return [float(number) for leaf in leaves for number in np.ravel(leaf)]


class Orbax(keras.callbacks.OrbaxCheckpoint):
    """An OrbaxCheckpoint that needs no package."""

    def __init__(self):
        keras.callbacks.Callback.__init__(self)


def sharded():
    """Return the model after an update in which no process holds all of a layer's kernel, and what
    saving says.
    """
    keras.utils.clear_session()
    devices = keras.distribution.DeviceMesh(
        (2, 2), ["columns", "rows"], keras.distribution.list_devices()[:4]
    )
    places = keras.distribution.LayoutMap(devices)
    places[".*dense/kernel"] = (None, "columns")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=places, batch_dim_name="rows")
    )
    x = np.random.default_rng(0).integers(-2, 3, (16, 4)).astype("float32")
    inputs = [
        keras.Input((4,)),
        keras.layers.Dense(8, "relu", kernel_initializer="ones", name="dense"),
    ]
    model = keras.Sequential(
        [*inputs, keras.layers.Dense(2, kernel_initializer="ones", name="last")]
    )
    model.compile(keras.optimizers.Adam(0.125), "mse")
    trainer = ws.Trainer(model)
    for _ in trainer.steps(ws.Batches((x, x[:, :2]), 16, shuffle=False), epochs=3):
        pass
    whole = jax.jit(
        lambda values: values, out_shardings=trainer.executor.engine.replicas.layout.everywhere
    )
    said = ""
    try:
        if jax.process_count() > 1:
            best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
            trainer.fit(
                x, x[:, :2], verbose=0, callbacks=[keras.callbacks.ModelCheckpoint("m.keras"), best]
            )
    except ws.SpecificationError as error:
        said = str(error)
    try:
        if jax.process_count() > 1:
            trainer.fit(x, x[:, :2], verbose=0, callbacks=[Orbax()])
    except ws.SpecificationError as error:
        said += str(error)
    values = whole([v.value for v in [*model.variables, *model.optimizer.variables]])
    return {
        "explain": trainer.explain(),
        "saving": said,
        "values": [np.asarray(v).tolist() for v in values],
    }


def write(folder):
    """Train with callbacks that print, or write files into a folder of each process's own."""
    folder = folder / str(ME)
    folder.mkdir(parents=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    known = keras.callbacks
    watchers = [
        known.ModelCheckpoint(str(folder / "m.keras")),
        known.CSVLogger(str(folder / "log.csv")),
    ]
    watchers += [
        known.BackupAndRestore(str(folder / "backup")),
        known.LearningRateScheduler(lambda _: 0.1, verbose=1),
    ]
    ws.Trainer(model).fit(
        np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), callbacks=watchers, verbose=2
    )


def places(columns):
    """Shard a layer's kernel and bias over `columns` of four devices; not at all for 0."""
    if not columns:
        return
    shape = (columns, 4 // columns)
    devices = keras.distribution.DeviceMesh(
        shape, ["columns", "rows"], keras.distribution.list_devices()[:4]
    )
    layouts = keras.distribution.LayoutMap(devices)
    layouts[".*wide/kernel"], layouts[".*wide/bias"] = (None, "columns"), ("columns",)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="rows")
    )


class At(keras.callbacks.Callback):
    """Calls a function after a given update of this call, in one process."""

    def __init__(self, update, do, process=ME):
        super().__init__()
        self.left = update if process == ME else 0
        self.do = do

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.do()


class Slow(keras.callbacks.Callback):
    """Takes some time for every batch, that there may be several questions."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)


def trained(checkpoints=None, seed=0, callbacks=(), columns=0):
    """Return digests of the results of a run of four epochs of six updates, and its History."""
    random.seed(seed)
    np.random.seed(seed)
    keras.utils.clear_session()
    places(columns)
    x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
    y = np.arange(96) % 3
    layers = [
        keras.layers.Dense(8, "relu", name="wide"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
    ]
    model = keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(3, "softmax", name="last")]
    )
    model.compile(
        keras.optimizers.Adam(0.01, use_ema=True),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    known = [keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05), *callbacks]
    told = {"batch_size": 16, "epochs": 4, "verbose": 0, "validation_data": (x[:20], y[:20])}
    history = ws.Trainer(model).fit(x, y, callbacks=known, checkpoints=checkpoints, **told).history
    found = {}
    for part, variables in (("model", model.variables), ("optimizer", model.optimizer.variables)):
        for i, variable in enumerate(variables):
            for shard in variable.value.addressable_shards:
                found[f"{part}/{i}/{shard.index}"] = zlib.crc32(
                    np.ascontiguousarray(shard.data).tobytes()
                )
    return {"values": found, "history": history}


def stop():
    raise KeyboardInterrupt


def resumed(layout, folder):
    """Return what a whole run leaves behind, what an interrupted one does when it goes on, and once
    more at its end.
    """
    columns = {"replicas": 0, "sharded": 2}[layout]
    saves = ws.Checkpoints(
        folder, every_steps=4, every_seconds=None, keep=2, keep_best=("val_loss", 1)
    )
    found = [trained(columns=columns)]
    try:
        trained(saves, callbacks=[At(9, stop)], columns=columns)
    except KeyboardInterrupt:
        found += [trained(saves, seed=1, columns=columns), trained(saves, seed=2, columns=columns)]
    return found


def ended(folder, **how):
    """Return what a run leaves behind that is saved every fourth update."""
    return trained(ws.Checkpoints(folder, every_steps=4, every_seconds=None), **how)


def fault(what):
    """Train until something happens in one process."""
    print("pid", os.getpid(), flush=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 5)).astype("float32")
    y = rng.normal(size=(64, 1)).astype("float32")
    if what == "other data" and ME == 1:
        x[3] = 7.0
    if what == "nan":
        x[17] = np.nan
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(1, "tanh" if what == "other code" and ME == 1 else None),
        ]
    )
    model.compile("adam", "mse")
    if what == "other values" and ME == 1:
        model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
    trainer = ws.Trainer(model)
    if what == "other calls" and ME == 0:
        trainer.fit(x, y, verbose=0, checkpoints="never")
    if what == "other calls":
        trainer.fit(x, y, verbose=0)
    if what == "uneven":
        batches = ws.Batches((x[:16], y[:16]) for _ in range(5 - ME))
    else:
        batches = ws.Batches((x, y), 16, seed=1)
    for step in trainer.steps(batches, epochs=1 if what == "uneven" else 200):
        if step.number == FAULT_AFTER:
            happen(what)
    print("not a word of trouble", flush=True)


def happen(what):
    if what == f"killed {ME}":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == f"stopped {ME}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == f"terminated {ME}":
        os.kill(os.getpid(), signal.SIGTERM)
    if what == f"error {ME}":
        raise OSError("the disk is gone")
    if what == f"busy {ME}":
        time.sleep(1000)
    if what == f"exit {ME}":
        sys.exit(3)


def lose(kind, process, place):
    """Train until one process is lost: in a callback of fit, or in a loop over steps."""

    def happen(stop):
        time.sleep(2)  # the others have seen a sign of life since it compiled
        print("FAULT", time.time(), flush=True)
        {
            "exit": partial(sys.exit, 0),
            "exit 3": partial(sys.exit, 3),
            "error": partial(open, "nowhere/to/be/found"),
            "left": partial(os._exit, 0),
            "killed": partial(os.kill, os.getpid(), signal.SIGKILL),
            "sleeps": partial(time.sleep, 1000),
            "stops": stop,
        }[kind]()

    x = np.ones((64, 5), "float32")
    y = np.ones((64, 1), "float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    trainer = ws.Trainer(model)
    if place == "callback":
        stop = partial(setattr, model, "stop_training", True)
        trainer.fit(
            x,
            y,
            epochs=200,
            verbose=0,
            callbacks=[At(FAULT_AFTER, partial(happen, stop), process), Slow()],
        )
    else:
        stops = []
        for step in trainer.steps(ws.Batches((x, y), 16, seed=1), epochs=200):
            if step.number == FAULT_AFTER and process == ME:
                happen(partial(stops.append, True))
            if stops:
                break
    print("not a word of trouble", flush=True)


def work(what):
    if what == "cases":
        found = {
            "cases": all_cases(many=jax.process_count() == 4),
            "loaded": rows_loaded(),
            "buckets": losses_in_buckets(),
            "runs": whole_runs() if jax.process_count() == 4 else [],
        }
        print("FOUND", json.dumps(found), flush=True)
    elif what == "sharded":
        print("FOUND", json.dumps(sharded()), flush=True)
    elif what == "write":
        write(Path(sys.argv[2]) / "plain")
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        write(Path(sys.argv[2]) / "distribution")
    elif what.startswith("resumed"):
        print("FOUND", json.dumps(resumed(what.split()[1], Path(sys.argv[2]))), flush=True)
    elif what.startswith("go on"):  # "go on 4": over how many devices a layer lies
        columns = int(what.split()[-1]) if what[-1].isdigit() else 0
        print("FOUND", json.dumps(ended(Path(sys.argv[2]), seed=1, columns=columns)), flush=True)
    elif what.startswith(
        "saving"
    ):  # "saving killed 1": what happens in the ninth update, and in which process
        print("pid", os.getpid(), flush=True)
        _, how, process, *columns = what.split()
        callbacks = [At(9, partial(happen, f"{how} {ME}"), int(process)), Slow()]
        left = ended(
            Path(sys.argv[2]), callbacks=callbacks, columns=int(columns[0]) if columns else 0
        )
        print("FOUND", json.dumps(left), flush=True)
    elif what.startswith("lose"):  # "lose exit 3/1/callback"
        kind, process, place = what.removeprefix("lose ").split("/")
        lose(kind, int(process), place)
    elif what == "brisk":  # the threads talk to the store without a pause
        group._INTERVAL = 0.0
        time.sleep(1.5)
    else:
        fault(what)


if __name__ == "__main__":
    for what in sys.argv[1].split(", "):
        work(what)
