"""Weights are loaded by name, all required ones or none, and the result lists every name."""

import os
import re
import resource

import keras
import numpy as np
import pytest
from exact import integers

import wholestep as ws

KINDS = ("checkpoint", "task.keras", "task.weights.h5")


def task(num_classes=2, names=("low", "high"), around="backbone"):
    """Return a model of a backbone and a head, with weights of integers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, name=names[0])(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    backbone = keras.Model(inputs, keras.layers.Dense(4, name=names[1])(hidden), name=around)
    model = keras.Model(
        inputs, keras.layers.Dense(num_classes, name="head")(backbone(inputs)), name="task"
    )
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=i) ** 2)  # a variance must not be negative
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def saved(model, kind, folder):
    """Save a model; for a checkpoint, after an update."""
    path = folder / kind
    if kind == "checkpoint":
        trainer = ws.Trainer(model)
        trainer.fit(
            integers(4, 3), integers(4, model(integers(4, 3)).shape[-1]), batch_size=4, verbose=0
        )
        trainer.save(path)
    elif kind.endswith(".keras"):
        model.save(path)
    else:
        model.save_weights(path)
    return path


def bits(weights):
    return {v.path: keras.ops.convert_to_numpy(v).tobytes() for v in weights}


def scrambled(model):
    for variable in model.weights:
        variable.assign(integers(*variable.shape, seed=99))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_is_loaded_and_the_head_stays(kind, tmp_path):
    first = task(2)
    path = saved(first, kind, tmp_path)
    second = scrambled(task(5))
    head = bits(second.get_layer("head").weights)
    result = ws.load_weights(second.get_layer("backbone"), path)
    assert bits(second.get_layer("backbone").weights) == bits(first.get_layer("backbone").weights)
    assert bits(second.get_layer("head").weights) == head
    assert [*result.loaded] == [v.path for v in second.get_layer("backbone").weights]
    assert result.missing == [] == [*result.mismatched]
    assert len(result.unused) == 2
    assert all("head/" in name for name in result.unused)
    assert "loaded: 8" in str(result)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_if_a_required_weight_is_refused(kind, tmp_path):
    path = saved(task(2), kind, tmp_path)
    model = scrambled(task(5))
    before = bits(model.weights)
    with pytest.raises(
        ws.SpecificationError,
        match=r"head/kernel \(\(4, 2\) in the file, \(4, 5\) here\).*Try: rename",
    ):
        ws.load_weights(model, path)
    with pytest.raises(ws.SpecificationError, match="head/bias"):
        ws.load_weights(model, path, skip_mismatch="kernel$")
    assert bits(model.weights) == before
    result = ws.load_weights(model, path, skip_mismatch="^head/")
    assert [*result.mismatched] == ["head/kernel", "head/bias"]
    assert ws.load_weights(model, path, skip_mismatch=True) == result
    assert result.mismatched["head/bias"] == "(2,) in the file, (5,) here"
    assert sum(bits(model.weights)[name] != value for name, value in before.items()) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rename", [{"(^|/)low/": r"\1first/"}, lambda name: re.sub(r"\blow/", "first/", name)], ids=type
)
def test_names_are_mapped(kind, rename, tmp_path):
    first = task()
    path = saved(first, kind, tmp_path)
    second = scrambled(task(names=("first", "high"), around="encoder"))
    with pytest.raises(ws.SpecificationError, match=r"first/kernel \(missing\).*unused: .*low/"):
        ws.load_weights(second, path)
    result = ws.load_weights(second, path, rename=rename)
    assert [*bits(second.weights).values()] == [*bits(first.weights).values()]
    assert "low/" in result.loaded["first/kernel"]
    with pytest.raises(ws.SpecificationError, match=r"head/kernel \(missing\)"):
        ws.load_weights(
            second,
            path,
            rename=lambda name: None if "head" in name else name,
            skip_mismatch="first",
        )


def towers():
    """Return a model of two layers that Keras names, in attributes whose order is not the order of
    the layers.
    """

    class Towers(keras.Model):
        def __init__(self):
            super().__init__(name="towers")
            self.b, self.a = keras.layers.Dense(3), keras.layers.Dense(3)

        def call(self, x):
            return self.a(self.b(x))

    model = Towers()
    model(np.zeros((1, 3), "float32"))
    for i, variable in enumerate(model.weights):
        variable.assign(integers(*variable.shape, seed=i))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("kind", ["checkpoint", "task.weights.h5"])
def test_numbers_that_keras_appends_may_differ(kind, tmp_path):
    first = towers()
    path = saved(first, kind, tmp_path)
    second = scrambled(towers())  # dense_2 and dense_3
    result = ws.load_weights(second, path)
    for one, two in ((first.a, second.a), (first.b, second.b)):
        assert [*bits(one.weights).values()] == [*bits(two.weights).values()]
    assert result.missing == result.unused == []


def test_names_that_cannot_be_told_apart_are_missing(tmp_path):
    path = saved(task(names=("dense", "dense_1")), "checkpoint", tmp_path)
    inputs = keras.Input((3,))
    alone = keras.Model(inputs, keras.layers.Dense(4, name="dense_7")(inputs))
    with pytest.raises(
        ws.SpecificationError, match=r"At least one weight .* none; in the file: .*dense/kernel"
    ):
        ws.load_weights(alone, path, skip_mismatch=True)
    both = keras.Model(inputs, keras.layers.Dense(2, name="head")(alone(inputs)))
    result = ws.load_weights(both, path, skip_mismatch=True)
    assert {"dense_7/kernel", "dense_7/bias"} <= {*result.missing}
    assert {*result.loaded} == {"head/kernel", "head/bias"}


def of_layer(layer):
    return keras.Sequential([keras.Input((4,)), layer])


@pytest.mark.parametrize("made", [keras.layers.BatchNormalization, keras.layers.LayerNormalization])
def test_an_index_is_no_name_where_a_layer_has_other_weights(made, tmp_path):
    first = of_layer(made(name="norm"))
    first.set_weights([np.full(4, i + 1.0, "float32") for i in range(len(first.get_weights()))])
    first.save(tmp_path / "a.keras")
    other = of_layer(made(name="norm", scale=False))
    before = bits(other.weights)
    with pytest.raises(ws.SpecificationError, match=r"norm/beta \(missing\)"):
        ws.load_weights(other, tmp_path / "a.keras")
    assert bits(other.weights) == before
    assert (
        len(ws.load_weights(of_layer(made(name="norm")), tmp_path / "a.keras").loaded)
        == len(before) + 1
    )


def test_integers_are_no_weights_of_a_floating_layer(tmp_path):
    first = of_layer(keras.layers.Dense(4, name="dense"))
    first.layers[0].quantize("int8")
    first.save(tmp_path / "a.keras")
    with pytest.raises(ws.SpecificationError, match=r"dense/kernel \(missing\)"):
        ws.load_weights(of_layer(keras.layers.Dense(4, name="dense")), tmp_path / "a.keras")
    counted = keras.layers.Layer(name="counted")
    counted.add_weight(
        shape=(4,), dtype="int32", name="number", initializer="ones", trainable=False
    )
    floating = keras.layers.Layer(name="counted")
    floating.add_weight(shape=(4,), name="number")
    for layer in (counted, floating):
        layer.build((None, 4))
    keras.Sequential([keras.Input((4,)), counted]).save_weights(tmp_path / "b.weights.h5")
    with pytest.raises(ws.SpecificationError, match="int32 in the file, float32 here"):
        ws.load_weights(floating, tmp_path / "b.weights.h5")


def test_lora_is_loaded_with_its_kernel_or_not_at_all(tmp_path):
    first = task()
    first.get_layer("backbone").get_layer("high").enable_lora(2)
    first.compile("sgd", "mse")
    path = saved(first, "checkpoint", tmp_path)
    second = scrambled(task())
    before = bits(second.weights)
    with pytest.raises(
        ws.SpecificationError, match=r"high/lora_kernel_a without a weight here.*enable_lora"
    ):
        ws.load_weights(second, path)
    assert bits(second.weights) == before
    second.get_layer("backbone").get_layer("high").enable_lora(2)
    ws.load_weights(second, path)
    assert bits(second.weights) == bits(first.weights)
    merged = saved(first, "task.keras", tmp_path)
    third = scrambled(task())
    ws.load_weights(third, merged)
    x = integers(4, 3)
    np.testing.assert_allclose(third(x), first(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_file_needs_no_temporary_folder(kind, tmp_path, monkeypatch):
    first = task()
    path = saved(first, kind, tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))  # as by TMPDIR
    second = scrambled(task())
    ws.load_weights(second, path)
    assert bits(second.weights) == bits(first.weights)
    if kind == "checkpoint":
        trainer = ws.Trainer(scrambled(task()))
        trainer.restore(path)
        assert bits(trainer.model.weights) == bits(first.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_descriptor_nothing_changes(kind, tmp_path):
    path = saved(task(), kind, tmp_path)
    trainer = ws.Trainer(scrambled(task()))
    before = bits(trainer.model.weights)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    calls = [lambda: ws.load_weights(trainer.model, path)]
    calls += [lambda: trainer.restore(path)] if kind == "checkpoint" else []
    for call in calls:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(ws.CheckpointError, match="Too many open files"):
                call()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert bits(trainer.model.weights) == before


@pytest.mark.parametrize("kind", KINDS[:2])
def test_training_goes_on_with_the_loaded_weights(kind, tmp_path):
    path = saved(task(), kind, tmp_path)
    x = integers(8, 3)
    y = integers(8, 2)

    def trained(model, trains_before):
        trainer = ws.Trainer(model)
        if trains_before:
            trainer.fit(x, -y, batch_size=8, verbose=0)
        ws.load_weights(model, path)
        trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return bits(model.weights)

    assert trained(task(), trains_before=False) == trained(scrambled(task()), trains_before=True)


@pytest.mark.own
def test_bfloat16_is_loaded_and_restored(tmp_path):
    keras.config.set_dtype_policy("bfloat16")
    first = task()
    second = scrambled(task())
    ws.load_weights(second, saved(first, "task.weights.h5", tmp_path))
    assert bits(second.weights) == bits(first.weights)
    path = saved(first, "checkpoint", tmp_path)
    ws.load_weights(second, path)
    assert bits(second.weights) == bits(first.weights)
    trainer = ws.Trainer(scrambled(task()))
    trainer.restore(path)
    assert bits(trainer.model.weights) == bits(first.weights)


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        (["x.keras"], {}, "readable in .*x.keras"),
        (["none"], {}, "no such folder: .*none"),
        ([None], {}, "path must be a path"),
        (["s3://bucket/x.keras"], {}, "local disk.*Received: s3://bucket/x.keras"),
        (["folder.keras"], {}, "none in .*folder.keras"),
        (["pipe.keras"], {}, "not a regular file"),
        (["text.txt"], {}, "folder of checkpoints, or in a .keras"),
        (["text.keras"], {}, "readable in .*text.keras"),
        (["text.weights.h5"], {}, "readable in .*text.weights.h5"),
        (["x.keras"], {"rename": 3}, "rename must be a dict of patterns"),
        (["x.keras"], {"rename": {"(": ""}}, r"regular expression.*'\('"),
        (["x.keras"], {"rename": {"a": None}}, r"replacement text.*'a': None"),
        (["x.keras"], {"rename": {"^a": r"\1x"}}, "invalid group reference"),
        (["x.keras"], {"skip_mismatch": 3}, "skip_mismatch must be True, False"),
        (["x.keras"], {"skip_mismatch": "("}, "regular expression"),
    ],
)
def test_what_cannot_be_loaded_is_refused(given, named, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ending in ("txt", "keras", "weights.h5"):
        (tmp_path / f"text.{ending}").write_text("text")
    (tmp_path / "folder.keras").mkdir()
    os.mkfifo(tmp_path / "pipe.keras")
    with pytest.raises((ws.SpecificationError, ws.CheckpointError), match=words):
        ws.load_weights(task(), *given, **named)


def test_rename_returns_a_name(tmp_path):
    with pytest.raises(ws.SpecificationError, match=r"must return a name, or None .* 3 for 'head/"):
        ws.load_weights(
            task(),
            saved(task(), "checkpoint", tmp_path),
            rename=lambda name: 3 if "head" in name else name,
        )


def test_a_model_must_be_built():
    with pytest.raises(ws.SpecificationError, match="an unbuilt Sequential"):
        ws.load_weights(keras.Sequential([keras.layers.Dense(2)]), "x.keras")
    with pytest.raises(ws.SpecificationError, match="a built model or layer"):
        ws.load_weights("x.keras", "x.keras")


@pytest.mark.parametrize("kind", ["link", "storage", "group", "layers"])
def test_a_file_that_names_another_file_is_refused(kind, tmp_path):
    import h5py

    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    made.save_weights(tmp_path / "a.weights.h5")
    made.save_weights(tmp_path / "other.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5", "r+") as file:
        values = file["layers/dense/vars"]
        if kind == "group":
            del file["layers/dense/vars"]
            file["layers/dense/vars"] = h5py.ExternalLink("other.weights.h5", "layers/dense/vars")
        elif kind == "layers":
            del file["layers"]
            file["layers"] = h5py.ExternalLink("other.weights.h5", "layers")
        else:
            del values["0"]
            if kind == "link":
                values["0"] = h5py.ExternalLink("other.weights.h5", "layers/dense/vars/0")
            else:
                values.create_dataset("0", (3, 2), "f4", external=[("other.weights.h5", 0, 24)])
    before = made.get_weights()[0].copy()
    with pytest.raises(ws.CheckpointError, match="not stored in this file"):
        ws.load_weights(made, tmp_path / "a.weights.h5")
    np.testing.assert_array_equal(made.get_weights()[0], before)
