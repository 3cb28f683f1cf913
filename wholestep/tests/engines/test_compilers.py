"""Which compiler carries out updates: found by trying on TensorFlow, before anything changed; JAX
has one.
"""

import keras
import numpy as np
import pytest
from shares import share

import wholestep as ws

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
X = np.random.default_rng(0).normal(size=(8, 3, 2)).astype("float32")
Y = np.ones((8, 1), "float32")
HOW = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}


def make(layer, **compile_with):
    model = keras.Sequential(
        [keras.Input((3, 2)), layer(), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", **compile_with)
    return model


@pytest.mark.parametrize(
    "layer",
    share(
        [
            lambda: keras.layers.GRU(2),
            lambda: keras.layers.LSTM(2),
            lambda: keras.layers.Bidirectional(keras.layers.LSTM(2)),
            lambda: keras.layers.SimpleRNN(2),
        ]
    ),
    ids=["GRU", "LSTM", "Bidirectional", "SimpleRNN"],
)
def test_recurrent_layers_train_on_arrays_as_in_keras(layer):
    ours = make(layer)
    theirs = make(layer)
    theirs.set_weights(ours.get_weights())
    trainer = ws.Trainer(ours)
    losses = trainer.fit(X, Y, **HOW).history["loss"], theirs.fit(X, Y, **HOW).history["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    assert ("XLA compiles it." in trainer.explain()) == ON_TENSORFLOW


@pytest.mark.skipif(not ON_TENSORFLOW, reason="gradients by lookups are TensorFlow's")
def test_steps_of_adagrad_by_lookups_are_compiled():
    """Keras' own division of lookups by a table is not: it would take three times as long."""
    words = keras.Input((3,), dtype="int32")
    vectors = keras.layers.Flatten()(keras.layers.Embedding(4000, 2)(words))
    model = keras.Model(words, keras.layers.Dense(1)(vectors))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    trainer = ws.Trainer(model)
    trainer.fit(np.arange(24).reshape(8, 3), Y, **HOW)
    lines = trainer.explain()
    assert "Of the 4000 rows" in lines
    assert "Adagrad squares or clips the gradient of each lookup" in lines
    assert "XLA compiles it." in lines


class Written(keras.layers.Layer):
    """Adds nothing, in a way for which XLA has no kernel."""

    def call(self, x):
        import tensorflow as tf

        return x + 0 * tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))


@pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX compiles everything")
@pytest.mark.slow
def test_what_xla_cannot_compile_runs_without_it():
    ours = make(Written)
    theirs = make(Written)
    theirs.set_weights(ours.get_weights())
    trainer = ws.Trainer(ours)
    losses = trainer.fit(X, Y, **HOW).history["loss"], theirs.fit(X, Y, **HOW).history["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "without XLA: XLA cannot compile it" in trainer.explain()


def dense():
    return keras.layers.Dense(2)


@pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX always compiles")
@pytest.mark.slow
def test_the_users_word_is_heard():
    said = {
        "auto": "XLA compiles it.",
        True: "XLA compiles it.",
        False: "without XLA: jit_compile=False.",
    }
    losses = []
    for word, explained in said.items():
        model = make(dense)
        model.set_weights([0.1 * np.ones_like(w) for w in model.get_weights()])
        trainer = ws.Trainer(model, jit_compile=word)
        losses += trainer.fit(X, Y, **HOW).history["loss"]
        assert explained in trainer.explain()
    assert losses == pytest.approx(losses[:2] * 3, rel=1e-6)
    trainer = ws.Trainer(make(dense, jit_compile=True))
    trainer.update((X, Y))  # alone in its dispatch, where XLA is not tried unless asked for
    assert "XLA compiles it." in trainer.explain()


@pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX compiles everything")
@pytest.mark.parametrize("layer", [keras.layers.GRU, keras.layers.LSTM])
def test_what_xla_is_known_not_to_compile_is_not_tried(layer, capfd):
    """The gradient of a second recurrent layer by its inputs; TensorFlow logs hundreds of lines
    where it is tried.
    """
    trainer = ws.Trainer(make(lambda: keras.Sequential([keras.layers.Dense(2), layer(2)])))
    trainer.fit(X, Y, **HOW)
    assert "without XLA: XLA cannot compile it (the gradient of a loop" in trainer.explain()
    assert "TensorListReserve" not in trainer.explain() + capfd.readouterr().err


@pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX always compiles")
def test_a_word_that_cannot_be_kept_is_said_so():
    trainer = ws.Trainer(make(Written), jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True has no effect: XLA cannot compile it"):
        trainer.fit(X, Y, **HOW)


@pytest.mark.skipif(ON_TENSORFLOW, reason="there it has an effect")
def test_an_update_without_a_compiler_is_not_to_be_had_on_jax():
    with pytest.warns(UserWarning, match="jit_compile=False has no effect"):
        ws.Trainer(make(dense, jit_compile=False)).fit(X, Y, **HOW)


def test_another_word_is_refused():
    with pytest.raises(ws.SpecificationError, match='must be True, False or "auto"'):
        ws.Trainer(make(dense), jit_compile="xla")


class Transposed(ws.Objective):
    def __call__(self, model, batch, training):
        rows = model(batch, training=training)
        return ws.Mean(keras.ops.sum(keras.ops.square(rows @ keras.ops.transpose(rows)), axis=1))


@pytest.mark.skipif(not ON_TENSORFLOW, reason="JAX knows the axes of a transposition as constants")
def test_axes_that_a_gradient_needs_are_constants_where_it_is_taken():
    # Else XLA takes all arguments for constants, and compiles anew whenever one has another value.
    trainer = ws.Trainer(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), Transposed(), optimizer="sgd"
    )
    trainer.fit(X[:, 0], batch_size=2, verbose=0)
    (program,) = trainer.executor.planner.programs.values()
    assert program.how == "XLA compiles it."
    inverted = 0
    for function in program.call.traced.graph.as_graph_def().library.function:
        kinds = {node.name: node.op for node in function.node_def}
        for node in function.node_def:
            if node.op == "InvertPermutation":
                inverted += 1
                assert kinds[node.input[0].split(":")[0]] in ("Const", "Sub")
    assert inverted
