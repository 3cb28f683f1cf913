"""A script that was changed between two runs: the run goes on and one line names the change, or it is refused."""

import re
import shutil

import keras
import numpy as np
import pytest
from keras import layers

import wholestep as ws

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype("float32")
Y = RNG.normal(size=(12, 1)).astype("float32")
VALIDATION = X[:4], Y[:4]
REFUSED = "refused: "
UNUSED = "learning rate 0.01, as saved (here: 0.001, which is not used; to use it, pass Checkpoints(folder, learning_rate="
RATES = keras.callbacks.LearningRateScheduler


@keras.saving.register_keras_serializable("changed")
class Times(layers.Layer):
    def __init__(self, factor=2.0, how=None):
        super().__init__(name="times")
        self.factor = factor
        self.how = how

    def call(self, x):
        return self.factor * x if self.how is None else self.how(x)


class Elsewise(Times):
    def call(self, x):
        return x / self.factor


class Own(keras.Model):
    def train_step(self, *given):
        return super().train_step(*given)


class OtherOwn(Own):
    def train_step(self, *given, **others):
        return super().train_step(*given, **others)


LIMIT = 7
every = 5


class Noting(keras.callbacks.Callback):
    def __init__(self, every=3):
        super().__init__()
        self.every = every

    def get_state(self):
        return {"limit": LIMIT, "every": self.every}

    def set_state(self, state):
        pass


def my_loss(y, out):
    return keras.ops.mean((y - out) ** 2, axis=-1)


def my_other_loss(y, out):
    return keras.ops.mean((y - out) ** 4, axis=-1)


my_other_loss.__name__ = "my_loss"


class MyObjective(ws.Objective):
    factor = 1.0

    def __call__(self, model, batch, training):
        x, y, *_ = batch
        return ws.Mean(self.factor * my_loss(y, model(x, training=training)))


class MyOtherObjective(MyObjective):
    factor = 3.0


def stop(monitor="loss", **how):
    return keras.callbacks.EarlyStopping(monitor, patience=how.pop("patience", 5), **how)


def network(
    units=4,
    hidden=None,
    norm=None,
    rate=0.2,
    end=None,
    more=(),
    swapped=False,
    kind=None,
    times=None,
    trainable=True,
):
    """Return a model, as the keyword arguments say."""
    first = layers.Dense(
        units,
        **{
            "activation": "relu",
            "kernel_regularizer": keras.regularizers.L2(1e-3),
            **(hidden or {}),
        },
    )
    middle = [layers.Dropout(rate, name="dropout"), times or Times()]
    first.trainable = trainable
    inside = [
        first,
        layers.BatchNormalization(**(norm or {})),
        *(middle[::-1] if swapped else middle),
        *more,
        layers.Dense(1, **(end or {})),
    ]
    if kind is None:
        return keras.Sequential([keras.Input((3,)), *inside])
    held = out = keras.Input((3,))
    for layer in inside:
        out = layer(out)
    return kind(inputs=held, outputs=out)


SGD = {"learning_rate": 0.01, "momentum": 0.5}


def script(*, optimizer=None, compiled=None, trainer=None, network=network, **model):
    """Return the trainer of a script before its first call; the keyword arguments change it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    made = network(**model)
    optimizer = (
        optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer)
        else keras.optimizers.SGD(**SGD | (optimizer or {}))
    )
    made.compile(optimizer, **{"loss": "mse", "metrics": ["mae"], **(compiled or {})})
    return ws.Trainer(made, **(trainer or {}))


def run(folder, *, fitting=None, checkpoints=None, **changed):
    """Run a script to the end of its epoch; the keyword arguments change it."""
    made_by = script(**changed)
    callbacks = [stop(), stop("val_loss"), Noting(), RATES(lambda epoch, rate: rate)]
    how = {
        "x": X,
        "y": Y,
        "batch_size": 4,
        "epochs": 1,
        "validation_data": VALIDATION,
        "callbacks": callbacks,
    }
    c = ws.Checkpoints(folder, **(checkpoints or {}))
    made_by.fit(**how | (fitting or {}), verbose=0, checkpoints=c)
    return made_by


def watched(*callbacks):
    return {"fitting": {"callbacks": [*callbacks]}}


SCHEDULE = keras.optimizers.schedules.ExponentialDecay
CALLBACKS = [stop(), stop("val_loss"), Noting()]
CHANGES = {
    "learning rate": ({"optimizer": {"learning_rate": 0.001}}, UNUSED),
    "momentum": ({"optimizer": {"momentum": 0.9}}, "changed settings: optimizer/momentum 0.9 (saved: 0.5)"),
    "nesterov": ({"optimizer": {"nesterov": True}}, "optimizer/nesterov True (saved: False)"),
    "clipnorm": ({"optimizer": {"clipnorm": 1.0}}, "optimizer/clipnorm 1.0 (saved: none)"),
    "clipvalue": ({"optimizer": {"clipvalue": 1.0}}, "optimizer/clipvalue 1.0"),
    "global clipnorm": ({"optimizer": {"global_clipnorm": 1.0}}, "optimizer/global_clipnorm 1.0"),
    "weight decay": ({"optimizer": {"weight_decay": 0.1}}, "optimizer/weight_decay 0.1"),
    "moving average": ({"optimizer": {"use_ema": True}}, REFUSED + "optimizer's variables are"),
    "accumulation": ({"optimizer": {"gradient_accumulation_steps": 2}}, REFUSED),
    "no momentum": ({"optimizer": {"momentum": 0.0}}, REFUSED + "optimizer's variables are"),
    "optimizer": ({"optimizer": keras.optimizers.Adam(0.01)}, REFUSED + "Received: Adam (saved: SGD)"),
    "schedule": ({"optimizer": {"learning_rate": SCHEDULE(0.01, 9, 0.5)}}, REFUSED + "optimizer's variables are"),
    "loss": ({"compiled": {"loss": "mae"}}, "loss mae (saved: mse)"),
    "loss class": ({"compiled": {"loss": keras.losses.Huber(2.0)}}, "loss Huber (saved: mse)"),
    "loss weights": ({"compiled": {"loss_weights": [2.0]}}, "loss_weights [2.0] (saved: none)"),
    "metrics": ({"compiled": {"metrics": ["mape"]}}, REFUSED + "metrics are"),
    "weighted metrics": ({"compiled": {"weighted_metrics": ["mape"]}}, REFUSED + "metrics are"),
    "activation": ({"hidden": {"activation": "tanh"}}, "dense/activation tanh (saved: relu)"),
    "L2": ({"hidden": {"kernel_regularizer": keras.regularizers.L2(0.1)}}, "dense/kernel_regularizer/l2 0.1 (saved"),
    "L1": ({"hidden": {"kernel_regularizer": "l1"}}, "dense/kernel_regularizer L1 (saved: L2)"),
    "no penalty": ({"hidden": {"kernel_regularizer": None}}, "dense/kernel_regularizer none (saved: L2)"),
    "constraint": ({"hidden": {"kernel_constraint": "max_norm"}}, "dense/kernel_constraint MaxNorm (saved: none)"),
    "penalty of outputs": ({"hidden": {"activity_regularizer": "l2"}}, "dense/activity_regularizer L2 (saved: none)"),
    "dtype of a layer": ({"hidden": {"dtype": "mixed_bfloat16"}}, "dense/dtype mixed_bfloat16 (saved: float32)"),
    "no bias": ({"hidden": {"use_bias": False}}, REFUSED + "model's weights are"),
    "units": ({"units": 5}, REFUSED + "model's weights are"),
    "frozen": ({"trainable": False}, REFUSED + "model's weights are"),
    "momentum of statistics": ({"norm": {"momentum": 0.5}}, "batch_normalization/momentum 0.5 (saved: 0.99)"),
    "epsilon": ({"norm": {"epsilon": 0.1}}, "batch_normalization/epsilon 0.1 (saved: 0.001)"),
    "dropout": ({"rate": 0.7}, "dropout/rate 0.7 (saved: 0.2)"),
    "activation of the end": ({"end": {"activation": "tanh"}}, "dense_1/activation tanh (saved: linear)"),
    "another layer": ({"more": [layers.ReLU()]}, "re_lu ReLU (saved: none)"),
    "order of layers": ({"swapped": True}, "connections of layers"),
    "attribute of a layer": ({"times": Times(3.0)}, "times/factor 3.0 (saved: 2.0)"),
    "function of a layer": ({"times": Times(how=lambda x: x)}, "times/how <lambda>"),
    "code of a layer": ({"times": Elsewise()}, "times Elsewise (saved: Times)"),
    "validation data": ({"fitting": {"validation_data": (X[4:8], Y[4:8])}}, "validation_data "),
    "no validation": ({"fitting": {"validation_data": None}}, "validation_data none (saved: "),
    "validation steps": ({"fitting": {"validation_steps": 1}}, "validation_steps 1 (saved: none)"),
    "validation every": ({"fitting": {"validation_freq": 2}}, "validation_freq 2 (saved: 1)"),
    "steps": ({"fitting": {"steps_per_epoch": 2}}, "steps_per_epoch 2 (saved: none)"),
    "class weight": ({"fitting": {"class_weight": {0: 1.0, 1: 2.0}, "y": (Y > 0).astype("int32")}}, REFUSED),
    "sample weight": ({"fitting": {"sample_weight": Y[:, 0] ** 2}}, REFUSED),
    "batch size": ({"fitting": {"batch_size": 6}}, REFUSED),
    "shuffle": ({"fitting": {"shuffle": False}}, REFUSED),
    "data": ({"fitting": {"x": X + 1}}, REFUSED + "its data are not"),
    "labels": ({"fitting": {"y": Y + 1}}, REFUSED),
    "seed": ({"trainer": {"seed": 1}}, REFUSED),
    "skips": ({"trainer": {"on_nonfinite": "skip"}}, "on_nonfinite skip (saved: raise)"),
    "microbatches": ({"trainer": {"microbatch_size": 2}}, "microbatch size 2 (auto before): from here not bit for bit"),
    "patience": (watched(stop(patience=2), *CALLBACKS[1:]), "EarlyStopping/patience 2 (saved: 5)"),
    "monitor": (watched(stop("mae"), *CALLBACKS[1:]), "EarlyStopping(monitor='mae') starts anew (saved: monitor="),
    "mode": (watched(stop(mode="max"), *CALLBACKS[1:]), "EarlyStopping(monitor='loss', mode='max') starts anew"),
    "no callback": (watched(*CALLBACKS[:1]), "no Noting (saved: Noting)"),
    "new callback": (watched(*CALLBACKS, keras.callbacks.TerminateOnNaN()), "TerminateOnNaN (saved: none)"),
    "setting of a callback": (watched(*CALLBACKS[:2], Noting(4)), "Noting/every 4 (saved: 3)"),
    "objective": ({"trainer": {"objective": MyObjective()}}, REFUSED + "metrics are"),
    "plateau": (watched(*CALLBACKS, keras.callbacks.ReduceLROnPlateau()), "ReduceLROnPlateau (saved: none)"),
    "scheduler": (watched(*CALLBACKS, RATES(lambda epoch, rate: 2 * rate)), "LearningRateScheduler/schedule <lambda>"),
}  # fmt: skip
FROM = {  # scripts that begin otherwise than the default
    "own loss": (
        {"compiled": {"loss": my_loss}},
        {"compiled": {"loss": my_other_loss}},
        "loss my_loss ",
    ),
    "huber": (
        {"compiled": {"loss": keras.losses.Huber(1.0)}},
        {"compiled": {"loss": keras.losses.Huber(2.0)}},
        "loss/delta 2.0 (saved: 1.0)",
    ),
    "decay": (
        {"optimizer": {"learning_rate": SCHEDULE(0.01, 9, 0.5)}, **watched()},
        {"optimizer": {"learning_rate": SCHEDULE(0.01, 9, 0.9)}, **watched()},
        "optimizer/learning_rate/decay_rate 0.9 (saved: 0.5)",
    ),
    "objective": (
        {"trainer": {"objective": MyObjective()}},
        {"trainer": {"objective": MyOtherObjective()}},
        "objective MyOtherObjective",
    ),
    "own step": ({"kind": Own}, {"kind": OtherOwn}, "other_own OtherOwn (saved: none)"),
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    run(path)
    return path


@pytest.fixture
def folder(first, tmp_path):
    return shutil.copytree(first, tmp_path / "copied")


def outcome(folder, capfd, changed):
    """Return the line that a changed script prints when it goes on, or its error."""
    capfd.readouterr()
    try:
        run(folder, **changed)
    except (ws.SpecificationError, ws.CheckpointError) as error:
        return REFUSED + str(error)
    return capfd.readouterr().err


def test_the_same_script_goes_on_without_a_word_of_changes(folder, capfd):
    assert outcome(folder, capfd, {}).count(";") == 0


def test_a_changed_global_number_is_not_called_code_alone(folder, capfd, monkeypatch):
    monkeypatch.setitem(globals(), "LIMIT", 8)
    assert "changed settings: Noting/code or globals " in outcome(folder, capfd, {})


def test_a_global_number_with_the_name_of_an_attribute_is_not_read(folder, capfd, monkeypatch):
    monkeypatch.setitem(globals(), "every", 6)
    assert "code or globals" not in outcome(folder, capfd, {})


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.slow
def test_a_change_is_named(name, folder, capfd):
    changed, expected = CHANGES[name]
    said = outcome(folder, capfd, changed)
    assert said.startswith(REFUSED) == expected.startswith(REFUSED), said
    assert expected.removeprefix(REFUSED) in said


def restored(folder, capfd, changed, *, fits=False):
    """Return the line that `restore` prints in a changed script, or the error of it or of `fit`."""
    trainer = script(**changed)
    capfd.readouterr()
    try:
        trainer.restore(folder)
        line = capfd.readouterr().err
        if fits:
            trainer.fit(X, Y, 4, epochs=2, verbose=0)
    except (ws.SpecificationError, ws.CheckpointError) as error:
        return REFUSED + str(error)
    return line


def differences(line):
    """Return what a line says besides the checkpoint."""
    return line if line.startswith(REFUSED) else line.strip().partition("; ")[2]


OF_MODEL = {name: changed for name, (changed, _) in CHANGES.items() if "fitting" not in changed} | {
    "accumulation": {
        "optimizer": {"clipnorm": 2.0, "weight_decay": 0.1}
    },  # with it, no trainer is made
    "same": {},
    "name of a layer": {"hidden": {"name": "first"}},
    "penalty of a bias": {"end": {"bias_regularizer": "l2"}},
    "loss's name": {"compiled": {"loss": keras.losses.MeanSquaredError()}},
    "class of an optimizer": {"optimizer": keras.optimizers.Lion(0.01)},
    "loss scale": {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(**SGD))},
}


if keras.backend.backend() == "jax":  # TensorFlow adds no penalty of float16 to a loss of float32
    OF_MODEL |= {"half precision": {"hidden": {"dtype": "float16"}}}


@pytest.mark.parametrize("name", OF_MODEL)
@pytest.mark.slow
def test_restore_says_of_a_changed_model_what_fit_says(name, folder, capfd):
    said = differences(outcome(folder, capfd, OF_MODEL[name]))
    is_refused = said.startswith(REFUSED)
    assert differences(restored(folder, capfd, OF_MODEL[name], fits=is_refused)) == said
    assert bool(said) == (name != "same")


def test_restore_names_a_changed_precision_and_a_learning_rate_that_is_not_used(folder, capfd):
    said = restored(
        folder, capfd, {"hidden": {"dtype": "float16"}, "optimizer": {"learning_rate": 0.001}}
    )
    assert said.startswith(f"wholestep: restored {folder}/step-00000003; ")
    assert UNUSED in said
    assert "changed settings: dense/dtype float16 (saved: float32)" in said


def test_restore_of_a_checkpoint_that_was_saved_by_hand_says_the_same(tmp_path, capfd):
    trainer = script()
    trainer.fit(X, Y, 4, verbose=0)
    trainer.save(tmp_path)
    assert restored(tmp_path, capfd, {}) == ""
    assert (
        differences(restored(tmp_path, capfd, {"rate": 0.7}))
        == "changed settings: dropout/rate 0.7 (saved: 0.2)"
    )
    trainer = script(rate=0.7)
    trainer.fit(X, Y, 4, epochs=2, verbose=0, checkpoints=tmp_path)
    said = capfd.readouterr().err
    assert differences(said) == "changed settings: dropout/rate 0.7 (saved: 0.2)"


def test_the_changes_of_a_model_that_is_not_built_are_said_once_when_it_is(tmp_path, capfd):
    def unbuilt(rate=0.2):
        return keras.Sequential(
            [layers.Dense(4, "relu"), layers.Dropout(rate, name="dropout"), layers.Dense(1)]
        )

    run(tmp_path, network=unbuilt)
    trainer = script(network=unbuilt, rate=0.7)
    capfd.readouterr()
    trainer.restore(tmp_path)
    assert capfd.readouterr().err == ""
    trainer.predict(X, verbose=0)
    assert differences(capfd.readouterr().err) == "changed settings: dropout/rate 0.7 (saved: 0.2)"
    trainer.fit(X, Y, 4, epochs=2, verbose=0)
    assert "changed" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_model_of_many_layers_resumes(tmp_path, capfd):
    """The settings of such a model are saved as digests, also the optimizer's."""

    def deep(rate=0.2):
        hidden = [
            layers.Dropout(rate, name=f"a_dropout_with_a_long_name_at_place_{i}_of_many")
            for i in range(500)
        ]
        return keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(1)])

    run(tmp_path, network=deep)
    assert outcome(tmp_path, capfd, {"network": deep}).count(";") == 0
    said = differences(outcome(tmp_path, capfd, {"network": deep, "rate": 0.3}))
    assert re.search(r"of_many_7 [0-9a-f]{8} \(saved: [0-9a-f]{8}\), 492 more$", said)
    assert restored(tmp_path, capfd, {"network": deep}) == ""
    assert differences(restored(tmp_path, capfd, {"network": deep, "rate": 0.3})) == said
    adam = {"network": deep, "optimizer": keras.optimizers.Adam(0.01)}
    assert outcome(tmp_path, capfd, adam).startswith(
        f"{REFUSED}{tmp_path} holds another run: its optimizer's"
    )


@pytest.mark.parametrize("name", FROM)
@pytest.mark.slow
def test_a_change_of_another_script_is_named(name, tmp_path, capfd):
    first, then, expected = FROM[name]
    run(tmp_path, **first)
    assert outcome(tmp_path, capfd, first).count(";") == 0
    assert expected in outcome(tmp_path, capfd, then)


class Halving(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate / 2)


def rate_after(folder, epochs, asked=None, rate=0.01):
    how = {"epochs": epochs, "callbacks": [Halving()]}
    made = run(
        folder, fitting=how, optimizer={"learning_rate": rate}, checkpoints={"learning_rate": asked}
    )
    return float(made.model.optimizer.learning_rate)


@pytest.mark.slow
def test_a_learning_rate_that_is_asked_for_is_taken_once(tmp_path, capfd):
    assert rate_after(tmp_path, 1) == pytest.approx(0.005)
    assert rate_after(tmp_path, 2, asked=0.1) == pytest.approx(0.05)
    assert "learning rate 0.1, as asked (0.005 before)" in capfd.readouterr().err
    assert rate_after(tmp_path, 3, asked=0.1) == pytest.approx(0.025)
    assert "learning rate" not in capfd.readouterr().err
    assert rate_after(tmp_path, 4) == pytest.approx(0.0125)
    assert "learning rate 0.025, as saved (here: 0.01" in capfd.readouterr().err


def test_a_learning_rate_is_asked_for_from_the_beginning(tmp_path):
    assert rate_after(tmp_path, 1, asked=0.1) == pytest.approx(0.05)
    assert rate_after(tmp_path, 2, asked=0.1) == pytest.approx(0.025)


def test_a_trainer_that_goes_on_in_its_process_says_nothing_of_its_rate(tmp_path, capfd):
    how = {"verbose": 0, "checkpoints": tmp_path, "callbacks": [Halving()]}
    trainer = run(tmp_path, fitting={"callbacks": [Halving()]})
    trainer.fit(X, Y, 4, epochs=2, validation_data=VALIDATION, **how)
    assert float(trainer.model.optimizer.learning_rate) == pytest.approx(0.0025)
    assert capfd.readouterr().err.endswith("batch 3); starts anew: Halving\n")


@pytest.mark.parametrize("rate", [-1, float("nan"), float("inf"), "fast", True])
def test_a_learning_rate_must_be_a_number(rate, tmp_path):
    with pytest.raises(ws.SpecificationError, match="learning_rate must be at least 0"):
        ws.Checkpoints(tmp_path, learning_rate=rate)


def test_a_schedule_is_given_no_learning_rate(tmp_path):
    with pytest.raises(ws.SpecificationError, match="a constant learning rate"):
        run(
            tmp_path,
            optimizer={"learning_rate": SCHEDULE(0.01, 9, 0.5)},
            checkpoints={"learning_rate": 0.1},
        )
    assert not [*tmp_path.glob("step-*")]
