"""A change of the model between two calls is noticed, without a walk over its layers."""

import keras
import numpy as np
import pytest
from shares import halves
from small import X, Y, count_calls, model, same

import wholestep as ws
from wholestep import context
from wholestep.program import ProgramCache


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has 64 bits")
def test_shapes_are_computed_with_the_bits_that_jax_has():
    assert context._symbolic(np.zeros(3, "int64")).dtype == "int32"
    assert context._symbolic(np.zeros(3, "uint8")).dtype == "uint8"


def freeze_a_layer(made):
    made.layers[0].trainable = False
    made.compile(keras.optimizers.SGD(0.1), made.loss)


def freeze_a_variable_alone(made):
    made.layers[0].kernel.trainable = False
    made.compile(keras.optimizers.SGD(0.1), made.loss)


def stop_statistics(made):
    made.layers[1].trainable = False  # it has no parameter: no variable's flag changes


def compile_again(made):
    made.compile(keras.optimizers.Adam(0.1), made.loss, metrics=["accuracy"])


def replace_the_optimizer(made):
    made.optimizer = keras.optimizers.SGD(0.5)


def assign(made):
    made.layers[0].kernel.assign(2 * made.layers[0].kernel)


def add_lora(made):
    made.layers[0].enable_lora(2)
    made.compile(keras.optimizers.SGD(0.1), made.loss)


CHANGES = [
    *(
        freeze_a_layer,
        freeze_a_variable_alone,
        stop_statistics,
        compile_again,
        replace_the_optimizer,
        assign,
    ),
    add_lora,
]


@pytest.mark.parametrize("change", halves(CHANGES))
def test_a_change_between_two_updates_is_noticed(change):
    """The known trainer, and one that is made after the change, leave the same bits."""
    weights = []
    for makes_another in (False, True):
        made = model(
            keras.layers.BatchNormalization(center=False, scale=False),
            optimizer=keras.optimizers.SGD(0.1),
        )
        trainer = ws.Trainer(made)
        trainer.train_on_batch(X, Y)
        trainer.test_on_batch(X, Y)
        keras.utils.set_random_seed(7)
        change(made)
        trainer = ws.Trainer(made) if makes_another else trainer
        told = [
            trainer.test_on_batch(X, Y),
            trainer.train_on_batch(X, Y),
            trainer.test_on_batch(X, Y),
        ]
        weights.append((told, made))
    assert weights[0][0] == weights[1][0]
    assert same(weights[0][1], weights[1][1])


@pytest.mark.own
@pytest.mark.slow
def test_single_updates_and_evaluations_walk_over_no_layers_and_ask_for_no_example(monkeypatch):
    made = model()
    trainer = ws.Trainer(made)
    trainer.train_on_batch(X, Y)
    trainer.test_on_batch(X, Y)
    walks = count_calls(monkeypatch, keras.Model, "_flatten_layers")
    examples = count_calls(monkeypatch, ws.Batches, "example")
    trainer.train_on_batch(X, Y)
    trainer.test_on_batch(X, Y)
    assert walks == []
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X, verbose=0)
    trainer.fit(X, Y, verbose=0)
    assert examples == []


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_evaluation_and_prediction_build_no_optimizer(call):
    made = model()
    ws.Trainer(made).evaluate(X, Y, verbose=0) if call == "evaluate" else ws.Trainer(made).predict(
        X, verbose=0
    )
    assert not made.optimizer.built


def test_programs_are_bounded():
    programs = ProgramCache(most=2)
    for i in range(5):
        programs[i,] = i
    assert list(programs.values()) == [3, 4]
    programs[3,] = 9  # a known key takes no other's place
    assert list(programs.values()) == [9, 4]
