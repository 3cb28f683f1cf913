"""A model that was built with a Python value in place of a mask is warned of at its first
update.
"""

import inspect
import re
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import wholestep as ws
from wholestep.model import values_for_tensors

L = keras.layers
X = np.array([[1, 2, 1, 2], [3, 3, 4, 4]])


def attending(mask, **how):
    """Return a compiled model of segments (rows, 4) that attends to itself under
    `mask(segments)`.
    """
    segments = keras.Input((4,), dtype="int32")
    x = L.Embedding(9, 4)(segments)
    x = L.MultiHeadAttention(2, 2, name="attention")(x, x, attention_mask=mask(segments), **how)
    model = keras.Model(segments, L.Dense(1)(x))
    model.compile("sgd", "mse")
    return model


def by_identity(segments):
    return segments[:, :, None] == segments[:, None, :]


def by_value(segments):
    return ops.equal(segments[:, :, None], segments[:, None, :])


CALLS = {
    "fit": lambda trainer: trainer.fit(X, X, verbose=0),
    "steps": lambda trainer: list(trainer.steps((X, X))),
    "update": lambda trainer: trainer.update((X, X)),
    "train_on_batch": lambda trainer: trainer.train_on_batch(X, X),
}


@pytest.mark.own
@pytest.mark.parametrize("call", CALLS)
def test_the_first_update_warns_of_a_mask_that_is_a_python_value(call):
    trainer = ws.Trainer(attending(by_identity, use_causal_mask=True))
    trainer.evaluate(X, X, verbose=0)  # no warning, which would be an error
    told = (
        r"Received: attention_mask=False of 'attention'. Try: keras.ops.equal\(a, b\) in place "
        r"of a == b"
    )
    with pytest.warns(UserWarning, match=told) as found:
        CALLS[call](trainer)
    assert [each.filename for each in found] == [__file__]
    for each in CALLS.values():
        each(trainer)  # said once


@pytest.mark.own
@pytest.mark.parametrize("call", CALLS)
def test_a_mask_that_is_a_tensor_is_not_warned_of(call):
    CALLS[call](ws.Trainer(attending(by_value, use_causal_mask=True)))


def decorated(function):
    return lambda *given, **named: function(*given, **named)


class Masked(L.Layer):
    def call(self, x, pair_mask=None):
        return x


def seen(layer, **given):
    x = keras.Input((4, 3))
    return x, layer(x, **given)


def both(operation):
    one, other, x = (keras.Input((4,)) for _ in range(3))
    return [one, other, x], operation(one == other, x)


FOUND = {
    "a cast": (
        lambda: seen(Masked(name="m"), pair_mask=ops.cast(keras.Input(()) == 0, "int32")),
        "pair_mask=.*int32.* of 'm'",
    ),
    "a mask of several": (
        lambda: seen(Masked(name="m"), pair_mask=[None, False]),
        r"pair_mask=\[None, False\] of 'm'",
    ),
    "and": (lambda: both(lambda same, x: same & (x > 0)), "x1=False of 'logical_and'"),
    "where": (lambda: both(lambda same, x: ops.where(same, x, 0.0)), "condition=False of 'where'"),
    "a product": (lambda: both(lambda same, x: x * same), "x2=False of 'multiply'"),
}


@pytest.mark.parametrize("name", FOUND)
def test_each_python_value_is_named(name):
    make, told = FOUND[name]
    (found,) = values_for_tensors(keras.Model(*make()))
    assert re.fullmatch(told, found)


def test_models_in_models_and_copies_are_searched(tmp_path):
    inner = attending(by_identity)
    told = ["attention_mask=False of 'attention'"]
    inputs = keras.Input((4,), dtype="int32")
    outer = keras.Model(inputs, L.Dense(2)(inner(inputs)))
    for model in (outer, keras.Sequential([inner, L.Dense(2)]), keras.models.clone_model(outer)):
        assert values_for_tensors(model) == told
    outer.save(tmp_path / "outer.keras")
    assert values_for_tensors(keras.models.load_model(tmp_path / "outer.keras")) == told


def test_the_calls_of_another_model_do_not_count():
    x, y = (keras.Input((4,)) for _ in range(2))
    softmax = L.Softmax()
    right = keras.Model(x, softmax(x))
    wrong = keras.Model([x, y], softmax(x, mask=x == y))
    assert values_for_tensors(right) == []
    assert len(values_for_tensors(wrong)) == 1


class Flagged(L.Layer):
    def call(self, x, use_mask: bool, mask_padding=False, **others):
        return x


FLAGS = {
    "attention": lambda x: L.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True, training=True),
    "grouped": lambda x: L.GroupQueryAttention(3, 2, 1)(x, x, use_causal_mask=True),
    "additive": lambda x: L.AdditiveAttention()([x, x], use_causal_mask=True),
    "mask of ones": lambda x: L.MultiHeadAttention(2, 3)(
        x, x, attention_mask=np.ones((4, 4), bool)
    ),
    "recurrent": lambda x: L.Bidirectional(L.LSTM(2))(L.Masking()(x), training=False),
    "statistics": lambda x: L.BatchNormalization()(x, training=False),
    "a layer of the user": lambda x: Flagged()(
        x, use_mask=True, mask_padding=True, other_mask=True
    ),
    "operations": lambda x: ops.where(x > 0, ops.clip(x * 2.0, 0.0, 1.0), 0.0) + 1,
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_layers_are_no_masks(name):
    x = keras.Input((4, 3))
    assert values_for_tensors(keras.Model(x, FLAGS[name](x))) == []


@pytest.mark.large
@pytest.mark.parametrize(
    "name", [n for n, m in vars(keras.applications).items() if inspect.ismodule(m)]
)
def test_no_application_of_keras_is_warned_of(name):
    kinds = [
        f
        for n, f in vars(getattr(keras.applications, name)).items()
        if n[0].isupper() and callable(f)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [values_for_tensors(kind(weights=None)) for kind in kinds[:1]] in ([], [[]])


class Traced(L.Layer):
    """A layer whose `call` is compiled, and hides its arguments."""

    call = decorated(lambda self, x, pair_mask=None: x)


@pytest.mark.own
def test_a_layer_that_hides_its_arguments_stops_no_training():
    x = keras.Input((4,))
    model = keras.Model(x, L.Dense(1)(Traced()(x, pair_mask=False)))
    model.compile("sgd", "mse")
    ws.Trainer(model).update((np.ones((2, 4)), np.ones((2, 1))))


def test_many_values_are_counted():
    x = y = keras.Input((4, 3))
    for i in range(5):
        y = Masked(name=f"m{i}")(y, pair_mask=False)
    model = keras.Model(x, L.Dense(1)(y))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="pair_mask=False of 'm2' and 2 more"):
        ws.Trainer(model).update((np.ones((2, 4, 3)), np.ones((2, 4, 1))))
