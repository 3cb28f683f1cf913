"""`run_eagerly`: model and objective see numbers; the update equals the compiled update."""

import keras
import numpy as np
import pytest
from shares import ENGINE, on
from small import X, Y

import wholestep as ws

L = keras.layers
ROWS = X[:10]
LABELS = Y[:10]


def numbers(value):
    """Return the numbers of a value whose gradient may be taken."""
    return np.asarray(keras.ops.stop_gradient(value))


class Looking(keras.Model):
    """Reads numbers wherever the user could set a breakpoint, if it `looks`; it is not built."""

    def __init__(self, *, looks):
        super().__init__()
        self.hidden, self.drop, self.out = (
            L.Dense(4, "tanh"),
            L.Dropout(0.3),
            L.Dense(4, kernel_regularizer="l2"),
        )
        self.looks = looks
        self.seen = []

    def call(self, x, training=False):
        hidden = self.drop(self.hidden(x), training=training)
        if self.looks:
            assert not training or hidden[0, 0] < 100  # a branch, by a number
            self.seen.append((training, numbers(hidden), float(numbers(keras.ops.sum(hidden)))))
        return self.out(hidden)


class Own(Looking):
    """Has a custom step."""

    def train_step(self, *given):
        if ENGINE == "tensorflow":
            import tensorflow as tf

            x, y = given[0]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.apply_gradients(
                zip(
                    tape.gradient(loss, self.trainable_variables),
                    self.trainable_variables,
                    strict=True,
                )
            )
            return {"loss": loss}
        import jax

        (params, buffers, slots, metrics), (x, y) = given

        def loss_of(params):
            outputs, after = self.stateless_call(params, buffers, x, training=True)
            return self.compute_loss(y=y, y_pred=outputs), after

        (loss, buffers), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        params, slots = self.optimizer.stateless_apply(slots, grads, params)
        return {"loss": loss}, (params, buffers, slots, metrics)


def made(kind, *, eager):
    keras.utils.set_random_seed(3)
    model = kind(looks=eager)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = None if kind is Own else ["accuracy"]
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=metrics, run_eagerly=eager)
    return model


def close(one, two):
    for a, b in zip(keras.tree.flatten(one), keras.tree.flatten(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def used(model):
    """Return what every method of a trainer has made of a model."""
    trainer = ws.Trainer(model)
    history = trainer.fit(ROWS, LABELS, batch_size=4, epochs=2, verbose=0).history
    found = [history["loss"], dict(trainer.update((ROWS[:4], LABELS[:4])))]
    found += [[step.loss for step in trainer.steps(ws.Batches((ROWS, LABELS), batch_size=4))]]
    found += [
        trainer.evaluate(ROWS, LABELS, batch_size=4, verbose=0),
        trainer.predict(ROWS, 4, verbose=0),
    ]
    return [*found, model.get_weights()], trainer


@pytest.mark.parametrize("kind", [Looking, pytest.param(Own, marks=on("tensorflow"))])
@pytest.mark.slow
def test_what_runs_eagerly_sees_numbers_and_is_the_same_update(kind):
    (compiled, _), model = used(made(kind, eager=False)), made(kind, eager=True)
    eager, trainer = used(model)
    close(compiled, eager)
    assert {training for training, *_ in model.seen} == {True, False}
    assert all(
        np.isclose(hidden.sum(), total, rtol=1e-4, atol=1e-5) for _, hidden, total in model.seen
    )
    assert "Nothing is compiled: the model says run_eagerly=True" in trainer.explain()
    # twice as many, to tell whose rows draws are
    shapes = {hidden.shape for _, hidden, _ in model.seen} - {(8, 4)}
    assert shapes == {(4, 4), (2, 4)}  # and no padding
    model.run_eagerly = False
    model.looks = False
    model.jit_compile = True  # the same trainer compiles from now on
    trainer.update((ROWS[:4], LABELS[:4]))
    assert "Nothing is compiled" not in trainer.explain()


class Counting(ws.Objective):
    """Prints what it computes."""

    def __init__(self):
        self.seen = []

    def __call__(self, model, batch, training):
        error = model(batch[0], training=training) - batch[1]
        self.seen.append(numbers(error))
        return ws.Mean(error**2)


def test_an_objective_sees_numbers_and_is_called_once_for_an_update_but_for_the_first():
    objective = Counting()
    model = keras.Sequential([keras.Input((6,)), L.Dense(1)])
    model.run_eagerly = True
    trainer = ws.Trainer(model, objective, optimizer="sgd")
    batches = [(row[None], np.zeros((1, 1), "float32")) for row in X[:5]]
    for batch in batches:
        trainer.update(batch)
    assert len(objective.seen) == 6
    assert len({error.item() for error in objective.seen}) == 5  # the first batch comes twice


class OfTraining(ws.Objective):
    """Counts the calls of training in a variable, which an evaluation does not assign."""

    def __init__(self):
        self.count = keras.Variable(0.0, trainable=False)

    def __call__(self, model, batch, training):
        if training:
            self.count.assign_add(1.0)
        x, y = batch
        return ws.Mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))


@pytest.mark.parametrize("eager", [True, False])
def test_a_variable_that_training_alone_assigns_is_kept_by_an_evaluation(eager):
    model = keras.Sequential([keras.Input(ROWS.shape[1:]), L.Dense(4)])
    model.compile("sgd", run_eagerly=eager)
    objective = OfTraining()
    trainer = ws.Trainer(model, objective)
    trainer.fit((ROWS, LABELS), batch_size=5, epochs=3, validation_data=(ROWS, LABELS), verbose=0)
    assert float(objective.count) == 6


def test_microbatches_are_seen_one_by_one():
    objective = Counting()
    model = keras.Sequential([keras.Input((6,)), L.Dense(1)])
    model.run_eagerly = True
    data = (X[:5], np.zeros((5, 1), "float32"))
    trainer = ws.Trainer(model, objective, optimizer="sgd", microbatch_size=2)
    trainer.update(data)
    del objective.seen[:]
    trainer.update(data)
    assert {len(error) for error in objective.seen} == {1, 2}


class Numpying(keras.Model):
    """Lets numpy read or compute between two layers."""

    def __init__(self, compute):
        super().__init__()
        self.hidden, self.out, self.compute = L.Dense(4), L.Dense(1), compute

    def call(self, x):
        return self.out(self.compute(self.hidden(x)))


def updated(compute, *, eager=True):
    """Return the weights after one update of a model in which numpy computes."""
    keras.utils.set_random_seed(3)
    model = Numpying(compute)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    ws.Trainer(model).update((ROWS, LABELS.astype("float32")[:, None]))
    return model.get_weights()


REFUSED = {
    "array": lambda h: h + 0 * np.size(np.asarray(h)),
    "numpy": np.tanh,
    "float": lambda h: h * float(keras.ops.sum(h)),
    "format": lambda h: h + len(f"{keras.ops.sum(h):.1f}"),
}


@on("jax")
@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_cannot_read_is_refused_with_the_way_to_read_it(name):
    if ENGINE == "jax":
        with pytest.raises(ws.SpecificationError, match=r"Try: .*keras\.ops\.stop_gradient"):
            updated(REFUSED[name])


def test_an_error_of_the_model_stays_as_it_is():
    def wrong(hidden):
        raise TypeError("of the model")

    with pytest.raises(TypeError, match="of the model"):
        updated(wrong)


def test_reading_numbers_beside_a_value_keeps_its_gradient():
    def looked(hidden):
        assert np.isfinite(numbers(hidden)).all()
        assert np.shape(hidden) == hidden.shape
        assert f"{numbers(keras.ops.sum(hidden)):.0f}"
        assert bool(keras.ops.sum(hidden) < 1e6)
        return np.float32(2) * hidden + np.ones((4,), "float32")

    close(updated(looked), updated(lambda hidden: 2 * hidden + 1, eager=False))


@on("jax")
def test_no_compiler_beside_run_eagerly_is_no_cause_for_a_warning(recwarn):
    model = keras.Sequential([keras.Input((6,)), L.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    ws.Trainer(model, jit_compile=False).update((ROWS, LABELS.astype("float32")[:, None]))
    assert [str(told.message) for told in recwarn] == []
