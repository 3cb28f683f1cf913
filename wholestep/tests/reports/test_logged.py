"""The numbers about an update that a user asks for are those of the update that was made."""

import keras
import numpy as np
import pytest
from launching import only_jax
from small import X, Y, model, same

import wholestep as ws

ALL = ["gradient_norm", "clipped_gradient_norm", "update_norm", "learning_rate", "loss_scale"]
DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(12, 3)).astype("float32")
LABELS = DRAW.normal(size=(12, 1)).astype("float32")


class Tells(keras.callbacks.Callback):
    """Records the logs and the weights after each update."""

    def __init__(self):
        super().__init__()
        self.logs = []
        self.weights = []

    def on_train_begin(self, logs=None):
        self.weights.append(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))
        self.weights.append(self.model.get_weights())

    def of(self, name):
        return [logs[name] for logs in self.logs]

    def moves(self):
        return [
            norm(after - before for before, after in zip(*pair, strict=True))
            for pair in zip(self.weights, self.weights[1:], strict=False)
        ]


def norm(values):
    return float(np.sqrt(sum(np.sum(np.square(value, dtype=float)) for value in values)))


def linear(optimizer):
    layer = keras.layers.Dense(1, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.1))
    unit = keras.Sequential([keras.Input((3,)), layer])
    unit.compile(optimizer, "mse")
    unit.set_weights([np.array([[1.0], [-2.0], [0.5]], "float32")])
    return unit


def gradient(weights, rows=slice(None)):
    """Return the gradient of `linear`, of its regularisation included."""
    (w,) = weights
    x = INPUTS[rows].astype(float)
    return 2 * x.T @ (x @ w - LABELS[rows]) / len(x) + 0.2 * w


def told(made, x, y, log=ALL, epochs=2, batch_size=6, **how):
    tells = Tells()
    trainer = ws.Trainer(made, log=log, **how)
    history = trainer.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[tells]
    )
    return tells, history.history


# ---- each number ----


@pytest.mark.own
@pytest.mark.parametrize("microbatch_size", ["auto", 1, 4])
def test_the_norm_of_the_gradient_is_that_of_the_whole_batch(microbatch_size):
    tells, history = told(linear("adam"), INPUTS, LABELS, microbatch_size=microbatch_size)
    halves = [slice(0, 6), slice(6, 12)] * 2
    expected = [norm([gradient(*at)]) for at in zip(tells.weights, halves, strict=False)]
    assert tells.of("gradient_norm") == pytest.approx(expected, rel=1e-5)
    assert tells.of("clipped_gradient_norm") == tells.of("gradient_norm")
    assert history["gradient_norm"] == tells.of("gradient_norm")[1::2]


@only_jax
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_log_the_norms_of_the_whole_batch(replicas):
    alone, _ = told(linear("adam"), INPUTS, LABELS)
    shared, _ = told(linear("adam"), INPUTS, LABELS, replicas=replicas)
    for name in ALL:
        assert shared.of(name) == pytest.approx(alone.of(name), rel=1e-5)


CLIPS = {
    "global_clipnorm": lambda g: g * min(1, 0.3 / norm([g])),
    "clipnorm": lambda g: g * min(1, 0.3 / norm([g])),
    "clipvalue": lambda g: np.clip(g, -0.3, 0.3),
}


@pytest.mark.own
@pytest.mark.parametrize("clip", CLIPS)
def test_the_norm_after_clips_is_that_of_the_gradient_that_is_applied(clip):
    tells, _ = told(linear(keras.optimizers.SGD(0.1, **{clip: 0.3})), INPUTS, LABELS, epochs=1)
    first = gradient(tells.weights[0], slice(0, 6))
    assert tells.of("gradient_norm")[0] == pytest.approx(norm([first]), rel=1e-5)
    clipped = norm([CLIPS[clip](first)])
    assert tells.of("clipped_gradient_norm")[0] == pytest.approx(clipped, rel=1e-5)
    assert tells.of("update_norm")[0] == pytest.approx(0.1 * clipped, rel=1e-4)


@pytest.mark.own
def test_the_norm_of_the_update_is_how_far_the_weights_move():
    adam = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    tells, _ = told(model(keras.layers.BatchNormalization(), optimizer=adam), X, Y)
    moves = [
        norm(w1 - w0 for w0, w1 in zip(*pair, strict=True))
        for pair in (
            ([w for w in before if w.ndim], [w for w in after if w.ndim])
            for before, after in zip(trained(tells), trained(tells)[1:], strict=False)
        )
    ]
    assert tells.of("update_norm") == pytest.approx(moves, rel=1e-4)


def trained(tells):
    """Return the trainable weights after each update: all but the moving statistics."""
    paths = [w.path for w in tells.model.weights]
    keep = [w.path for w in tells.model.trainable_weights]
    return [[w for p, w in zip(paths, at, strict=True) if p in keep] for at in tells.weights]


def words(optimizer, rows=5000):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(rows, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    made = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    made.compile(optimizer, "mse")
    return made


IDS = DRAW.integers(0, 40, size=(12, 5)).astype("int32")


@pytest.mark.own
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dense_gradients", [False, True])
def test_rows_of_a_table_that_are_looked_up_several_times_count_once(optimizer, dense_gradients):
    rate = 0.1 if optimizer == "sgd" else 0.01
    made = words(keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": rate}}))
    tells, _ = told(made, IDS, LABELS, microbatch_size=3, dense_gradients=dense_gradients)
    assert tells.of("update_norm") == pytest.approx(tells.moves(), rel=1e-4)
    if optimizer == "sgd":
        expected = [move / rate for move in tells.moves()]
        assert tells.of("gradient_norm") == pytest.approx(expected, rel=1e-4)


def test_the_rate_is_the_one_of_each_update():
    falls = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    tells, _ = told(linear(keras.optimizers.SGD(falls)), INPUTS, LABELS, epochs=1, batch_size=3)
    assert tells.of("learning_rate") == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_a_rate_that_a_callback_sets_is_logged_from_the_next_update_on():
    made = linear(keras.optimizers.SGD(0.5))

    class Sets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)

    tells = Tells()
    trainer = ws.Trainer(made, log="learning_rate")
    trainer.fit(INPUTS, LABELS, batch_size=3, shuffle=False, verbose=0, callbacks=[tells, Sets()])
    assert tells.of("learning_rate") == pytest.approx([0.5, 0.1, 0.05, 0.1 / 3])


@pytest.mark.own
def test_a_loss_scale_is_logged_and_is_in_no_norm():
    plain, _ = told(linear("sgd"), INPUTS, LABELS)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    tells, _ = told(linear(scaled), INPUTS, LABELS)
    assert tells.of("loss_scale") == [64.0] * 4
    assert plain.of("loss_scale") == [1.0] * 4
    for name in ("gradient_norm", "clipped_gradient_norm", "update_norm", "learning_rate"):
        assert tells.of(name) == pytest.approx(plain.of(name), rel=1e-5)


@pytest.mark.own
def test_an_update_that_is_skipped_moves_nothing():
    spoiled = np.array(INPUTS)
    spoiled[7] = np.nan
    with pytest.warns(UserWarning, match="Update 2 .* was skipped"):
        tells, _ = told(linear("adam"), spoiled, LABELS, on_nonfinite="skip", epochs=1)
    assert np.isnan(tells.of("gradient_norm")[1])
    assert tells.of("update_norm")[1] == 0
    assert tells.of("update_norm")[0] > 0


# ---- where they are seen ----


@pytest.mark.own
def test_what_is_logged_changes_no_bit_of_the_training():
    plain = model()
    ws.Trainer(plain).fit(X, Y, batch_size=6, epochs=2, verbose=0)
    logged = model()
    trainer = ws.Trainer(logged, log=ALL)
    history = trainer.fit(X, Y, batch_size=6, epochs=2, verbose=0, validation_data=(X, Y))
    assert same(plain, logged)
    assert {*ALL, "loss", "accuracy", "val_loss", "val_accuracy"} == set(history.history)


def test_steps_and_single_updates_have_them():
    trainer = ws.Trainer(linear("sgd"), log=["gradient_norm"])
    data = ws.Batches((INPUTS, LABELS), 6, shuffle=False)
    steps = [step.logs["gradient_norm"] for step in trainer.steps(data, epochs=1)]
    again = ws.Trainer(linear("sgd"), log=["gradient_norm"])
    alone = [
        again.update((INPUTS[rows], LABELS[rows]))["gradient_norm"]
        for rows in (slice(0, 6), slice(6, 12))
    ]
    assert alone == pytest.approx(steps, rel=1e-6)
    by_keras = again.train_on_batch(INPUTS[:6], LABELS[:6], return_dict=True)
    assert by_keras["gradient_norm"] > 0


def test_a_file_and_the_page_of_the_run_show_them(tmp_path):
    made = linear("sgd")
    report = ws.RunReport()
    trainer = ws.Trainer(made, log=["gradient_norm", "update_norm"])
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    trainer.fit(INPUTS, LABELS, batch_size=6, epochs=2, verbose=0, callbacks=[log, report])
    assert "gradient_norm,loss,update_norm" in (tmp_path / "log.csv").read_text()
    report.html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "Norm of the gradient" in page
    assert "Norm of the update" in page
    silent = ws.RunReport()
    ws.Trainer(made).fit(INPUTS, LABELS, batch_size=6, verbose=0, callbacks=[silent])
    silent.html(tmp_path / "silent.html")
    assert "Norm of" not in (tmp_path / "silent.html").read_text()


def test_a_run_goes_on_with_other_numbers_to_log(tmp_path):
    whole = model()
    ws.Trainer(whole).fit(X, Y, batch_size=6, epochs=3, verbose=0)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 6:
                raise KeyboardInterrupt

    how = {"batch_size": 6, "epochs": 3, "verbose": 0}
    saves = ws.Checkpoints(tmp_path, every_steps=1)
    with pytest.raises(KeyboardInterrupt):
        ws.Trainer(model(), log=ALL).fit(X, Y, **how, callbacks=[Stops()], checkpoints=saves)
    resumed = model()
    trainer = ws.Trainer(resumed, log=["update_norm"])
    history = trainer.fit(X, Y, **how, checkpoints=saves).history
    assert same(resumed, whole)
    assert len(history["update_norm"]) == 3


# ---- what is refused ----


@pytest.mark.parametrize("log", [["gradient"], "norm", 3, ["gradient_norm", None], iter(["norm"])])
def test_a_number_that_is_not_known_is_refused(log):
    with pytest.raises(ws.SpecificationError, match="log must hold names among gradient_norm"):
        ws.Trainer(model(), log=log)


def test_several_optimizers_have_no_rate_of_all():
    both = keras.optimizers.MultiOptimizer(
        lambda v: keras.optimizers.SGD(0.1 if v.path.endswith("bias") else 0.5)
    )
    tells, _ = told(model(optimizer=both), X, Y, log=["gradient_norm", "update_norm"], epochs=1)
    assert tells.of("update_norm") == pytest.approx(tells.moves(), rel=1e-4)
    trainer = ws.Trainer(model(optimizer=both), log=["learning_rate"])
    with pytest.raises(ws.SpecificationError, match="One optimizer must train all weights"):
        trainer.update((X, Y))


def test_a_term_of_the_same_name_is_refused():
    class Named(ws.Objective):
        def __call__(self, model, batch, training):
            return {"update_norm": ws.Mean(model(batch["x"], training=training)[:, 0])}

    unit = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trainer = ws.Trainer(unit, Named(), optimizer="sgd", log=["update_norm"])
    with pytest.raises(ws.SpecificationError, match="another 'update_norm'"):
        trainer.update({"x": INPUTS})


def test_a_step_of_ones_own_logs_its_own_numbers():
    class Own(keras.Sequential):
        def train_step(self, *given):
            return super().train_step(*given)

    own = Own([keras.Input((3,)), keras.layers.Dense(1)])
    own.compile("sgd", "mse")
    with pytest.raises(ws.SpecificationError, match="log="):
        ws.Trainer(own, log=["gradient_norm"])
