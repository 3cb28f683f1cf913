"""Intentions that are functions of a model and a batch, and models that train in turn."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import NUM, X, faults, reasons

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason

ENGINE = keras.backend.backend()
DRAW = np.random.default_rng(2)
ACTIONS = (np.arange(NUM) % 3).astype("int32")
ADVANTAGES = DRAW.normal(size=NUM).astype("float32")
MASKS = np.where(np.arange(NUM) % 4, 1.0, 0.0).astype("float32")
OTHERS = DRAW.normal(size=X.shape).astype("float32")
SAME = 0.2 + 0.6 * (np.arange(NUM) % 2).astype("float32")


class Autoencoder(keras.Model):
    """A variational one, whose draws are of Keras' seeds."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(4), layers.Dense(5)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=None):
        mean, spread = ops.split(self.encoder(x), 2, axis=1)
        drawn = keras.random.normal((8, 2), seed=self.seeds)
        return self.decoder(mean + drawn * ops.exp(spread / 2)), mean, spread


def bound(model, batch, training):
    (x,) = batch
    out, mean, spread = model(x, training=training)
    kl = ops.sum(mean**2 + ops.exp(spread) - spread - 1, axis=1) / 2
    return {"fit": ops.sum((out - x) ** 2, axis=1), "kl": kl}


def pairs(model, batch):
    (a, b), same = batch
    apart = ops.sum(
        (model(a, training=True) - model(b, training=True)) ** 2, axis=1
    )
    return {"pull": (apart, same), "push": (1 / (1 + apart), 1 - same)}


def contrast(model, batch):
    x, others = batch
    scores = ops.matmul(model(x, training=True), ops.transpose(others[:, :3]))
    labels = ops.arange(8)
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(labels, scores, True)
    )


def policy(model, batch):
    states, actions, advantages, masks = batch
    logits = ops.log_softmax(model(states, training=True))
    chosen = ops.sum(ops.one_hot(actions, 3) * logits, axis=1)
    return {"policy": (-chosen * advantages, masks)}


def total(found):
    """Return the loss of a batch."""
    named = found if isinstance(found, dict) else {"loss": found}
    sums = 0.0
    for term in named.values():
        values, weights = (
            term if isinstance(term, tuple) else (term, ops.ones_like(term))
        )
        sums = sums + ops.sum(values * weights) / ops.sum(weights)
    return sums


def part(leaf, rows):
    return (
        tuple(each[rows] for each in leaf)
        if isinstance(leaf, tuple)
        else leaf[rows]
    )


def of_inputs(num):
    keras.utils.set_random_seed(3)
    middle = [layers.Dense(4, "tanh"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((5,)), *middle, layers.Dense(num)])


def features():
    return of_inputs(3)


KINDS = {  # the function, the number of its calls, the model, the data
    "autoencoder": (bound, 1, Autoencoder, (X,)),
    "pairs": (pairs, 2, features, ((X, OTHERS), SAME)),
    "contrast": (contrast, 1, features, (X, OTHERS)),
    "policy": (policy, 1, features, (X, ACTIONS, ADVANTAGES, MASKS)),
}


def stepped(model, optimizer, value):
    """Make a step of an optimizer on a loss that is computed without arguments."""
    variables = model.trainable_variables
    if ENGINE == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = value()
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        grads = [ops.zeros(v.shape) if g is None else g for g, v in pairs]
    else:
        import jax

        others = model.non_trainable_variables

        def scoped(params):
            with keras.StatelessScope(
                [*zip(variables, params, strict=True)]
            ) as scope:
                loss = value()
            after = [scope.get_current_value(v) for v in others]
            return loss, [
                v.value if new is None else new
                for v, new in zip(others, after, strict=True)
            ]

        grads, after = jax.grad(scoped, has_aux=True)(
            [v.value for v in variables]
        )
        for variable, new in zip(others, after, strict=True):
            variable.assign(new)
    optimizer.apply(grads, variables)


def trained(model, data, loss, epochs=2):
    """Train by a function of a batch."""
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(NUM)
        for start in range(0, NUM, 8):
            batch = tuple(part(each, order[start : start + 8]) for each in data)
            stepped(model, optimizer, lambda batch=batch: total(loss(batch)))


def made(kind):
    keras.utils.set_random_seed(3)
    loss, calls, make, data = KINDS[kind]
    model = make()
    model(X[:8])
    mode = {"training": True} if kind == "autoencoder" else {}
    return (
        model,
        data,
        stepcheck.Objective(loss, calls),
        partial(loss, model, **mode),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_loop_is_certified(kind):
    model, data, stated, loss = made(kind)
    with stepcheck.watch(model, data, stated) as report:
        trained(model, data, loss)
    assert report.is_right, str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_other_numbers_is_found(kind):
    model, data, stated, loss = made(kind)

    def other(batch):
        found = loss(batch)
        if not isinstance(found, dict):
            return 1.3 * found
        name, *rest = found
        values = found[name]
        pair = (
            values
            if isinstance(values, tuple)
            else (values, ops.ones_like(values))
        )
        return {
            name: (ops.where(pair[1] > 0.5, 1.3, 1.0) * pair[0], pair[1])
        } | {each: found[each] for each in rest}

    with stepcheck.watch(model, data, stated) as report:
        trained(model, data, other)
    assert [each.stage for each in report.findings] == [Stage.GRADIENT], str(
        report
    )


def test_a_term_that_is_left_out_is_named():
    model, data, stated, loss = made("autoencoder")
    with stepcheck.watch(model, data, stated) as report:
        trained(model, data, lambda batch: {"fit": loss(batch)["fit"]})
    assert faults(report) == [Fault.OUTPUT_LEFT_OUT], str(report)
    assert "kl" in str(report)


def test_the_weights_of_a_mean_over_all_microbatches_are_those_of_the_update():
    """A masked policy loss whose batches are divided one by one is a mean of means."""
    model, data, stated, loss = made("policy")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    with stepcheck.watch(model, data, stated) as report:
        for start in range(0, NUM, 8):
            rows = np.arange(start, start + 8)
            batches = [
                tuple(part(each, own) for each in data)
                for own in (rows[:3], rows[3:])
            ]
            stepped(
                model,
                optimizer,
                lambda batches=batches: (
                    sum(total(loss(batch)) for batch in batches) / 2
                ),
            )
    assert faults(report) == [Fault.MEAN_OF_MEANS], str(report)


def test_a_function_that_fails_is_said():
    model, data, _, loss = made("policy")

    def fails(model, batch):
        raise LookupError("no such thing")

    with stepcheck.watch(model, data, stepcheck.Objective(fails)) as report:
        trained(model, data, loss)
    assert report.findings == []
    of_gradient = [
        each for each in report.unjudged if each.stage is Stage.GRADIENT
    ]
    assert [each.reason for each in of_gradient] == [Reason.LOSS_FAILED]
    assert "LookupError: no such thing" in str(report)


# ---- other models ----


def student():
    model, teacher = features(), features()
    teacher.layers[0].kernel.assign(2 * teacher.layers[0].kernel)

    def distilled(model, batch):
        (x,) = batch
        return (
            model(x, training=True)
            - ops.stop_gradient(teacher(x, training=False))
        ) ** 2

    return model, teacher, distilled


def test_a_student_is_judged_by_its_teacher_that_moves():
    """The teacher has the values of each pass, not those after the loop."""
    model, teacher, distilled = student()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, (X,), stepcheck.Objective(distilled)) as report:
        for start in [*range(0, NUM, 8)] * 2:
            stepped(
                model,
                optimizer,
                lambda at=start: total(distilled(model, (X[at : at + 8],))),
            )
            pairs = zip(
                teacher.trainable_variables,
                model.trainable_variables,
                strict=True,
            )
            for slow, quick in pairs:
                slow.assign(0.5 * slow + 0.5 * quick)
    assert report.is_right, str(report)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_two_models_of_a_gan_are_judged_in_one_with(is_right):
    keras.utils.set_random_seed(3)
    maker = keras.Sequential(
        [keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(5)]
    )
    critic = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    noise = DRAW.normal(size=(NUM, 2)).astype("float32")

    def fools(model, batch):
        return ops.softplus(
            -critic(model(batch[0], training=True), training=True)[:, 0]
        )

    def tells(model, batch):
        real, fake = batch
        of_real = ops.softplus(-model(real, training=True)[:, 0])
        return {
            "real": of_real,
            "fake": ops.softplus(model(fake, training=True)[:, 0]),
        }

    with (
        stepcheck.watch(
            maker, (noise,), stepcheck.Objective(fools)
        ) as of_maker,
        stepcheck.watch(
            critic, None, stepcheck.Objective(tells, calls=2)
        ) as of_critic,
    ):
        optimizers = [keras.optimizers.Adam(1e-2) for _ in range(2)]
        for optimizer, model in zip(optimizers, (maker, critic), strict=True):
            optimizer.build(model.trainable_variables)
        for start in [*range(0, NUM, 8)] * 2:
            real, drawn = X[start : start + 8], noise[start : start + 8]
            fake = ops.stop_gradient(maker(drawn, training=True))
            share = 1.0 if is_right else 0.5

            def judged(real=real, fake=fake, share=share):
                found = tells(critic, (real, fake))
                return ops.mean(found["real"]) + share * ops.mean(found["fake"])

            stepped(critic, optimizers[1], judged)
            stepped(
                maker, optimizers[0], lambda z=drawn: total(fools(maker, (z,)))
            )
    assert of_maker.is_right, str(of_maker)
    assert Stage.GRADIENT in of_critic.judged
    assert bool(faults(of_critic)) is not is_right, str(of_critic)


# ---- outputs ----


@pytest.mark.parametrize("are_both", [True, False])
def test_losses_of_outputs_that_are_applied_in_turn_are_no_error(are_both):
    """Two steps on two losses are another training than one on their sum; a loss without a step is an error."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(
        inputs, [layers.Dense(1)(hidden), layers.Dense(2)(hidden)]
    )
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    labels = X[:, :1], X[:, 1:3]
    with stepcheck.watch(model, (X, [*labels]), ["mse", "mse"]) as report:
        for start in [*range(0, NUM, 8)] * 2:
            rows = slice(start, start + 8)
            for i in range(1 + are_both):
                stepped(
                    model,
                    optimizer,
                    lambda i=i, rows=rows: ops.mean(
                        (model(X[rows], training=True)[i] - labels[i][rows])
                        ** 2
                    ),
                )
    if are_both:
        assert report.findings == [], str(report)
        assert Reason.IN_TURN in reasons(report)
    else:
        assert [each.stage for each in report.findings] == [Stage.GRADIENT], (
            str(report)
        )
