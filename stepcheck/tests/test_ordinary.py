"""Right loops by hand of ordinary scripts, which must neither be accused nor broken."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import X, Y, by, descend, faults, gradient_of, network, reasons

import stepcheck
import wholestep as ws
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason

ENGINE = keras.backend.backend()
ONLY_TENSORFLOW = pytest.mark.skipif(
    ENGINE != "tensorflow", reason="the loop is TensorFlow's"
)


def squared(outputs, labels):
    return ops.mean((outputs - labels) ** 2)


def looped(model, value=squared, *, optimizer=None, data=(X, Y), **meant):
    """Return the report of a loop by hand."""
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    if model.built:
        optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, data, **({"loss": "mse"} | meant)) as report:
        descend(model, value, data, 8, by(optimizer))
    return report


class Several(keras.Model):
    """A model that returns more beside its output."""

    def __init__(self, more):
        super().__init__()
        self.dense, self.more = layers.Dense(1), more
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, x, training=None):
        return {"out": self.dense(x) * self.scale, **self.more(self.scale)}


class OfOut(ws.Objective):
    """The squared error of the first output."""

    def __call__(self, model, batch, training):
        x, y = batch
        return ws.Mean((model(x, training=training)["out"] - y) ** 2)


@pytest.mark.parametrize("is_text", [False, True])
def test_what_a_model_returns_beside_tensors_breaks_no_loop(is_text):
    model = Several(
        lambda scale: (
            {"name": "a", "of": object()}
            if is_text
            else {"scale": scale, "one": 1.0}
        )
    )
    model(X)
    report = looped(
        model, lambda outputs, y: squared(outputs["out"], y), loss=OfOut()
    )
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


def spread(outputs, y):
    """A loss in which rows meet."""
    moved = (outputs - ops.mean(outputs)) * (y - ops.mean(y))
    return ops.mean(outputs**2) - ops.mean(moved)


class OfAllRows(ws.Objective):
    """The loss `spread`, stated by the outputs of all rows."""

    def __call__(self, model, batch, training):
        x, y = batch
        return ws.Whole(spread, (model(x, training=training), y))


@pytest.mark.parametrize("factor", [1, 8])
def test_a_loss_of_all_rows_is_stated_by_an_objective(factor):
    report = looped(
        network(),
        lambda outputs, y: factor * spread(outputs, y),
        loss=OfAllRows(),
    )
    assert Stage.GRADIENT in report.judged
    assert bool(report.findings) == (factor != 1), str(report)


class Eager(keras.Model):
    """A model that reads numbers while it runs."""

    def __init__(self):
        super().__init__()
        self.dense, self.num_positive = layers.Dense(1), 0

    def call(self, x):
        self.num_positive += bool(ops.mean(x) > 0)
        return self.dense(x)


@ONLY_TENSORFLOW
@pytest.mark.parametrize("loss", [lambda y, out: squared(out, y), "mse"])
def test_a_model_that_runs_eagerly_alone_can_be_watched(loss, verdicts):
    model = Eager()
    model(X)
    report = looped(model, loss=loss)
    assert report.findings == []
    assert report.has_seen
    verdicts.clear()  # no program can be made of it, and a stage ends with that error


def test_inputs_of_different_lengths_are_no_error():
    """As the one time step beside the rows of a diffusion model is."""
    inputs = [keras.Input((5,)), keras.Input(batch_shape=(1,))]
    model = keras.Model(inputs, layers.Dense(1)(inputs[0]) + inputs[1][:, None])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    gradient = gradient_of(model, squared)
    with stepcheck.watch(model, ([X, X[:, 0]], Y), "mse") as report:
        for start in range(0, 24, 8):
            rows = slice(start, start + 8)
            by(optimizer)(
                model.trainable_variables,
                gradient([X[rows], X[:1, 0]], Y[rows]),
            )
    assert not report.has_seen
    assert report.findings == []


class WithArguments(keras.optimizers.SGD):
    """An optimizer whose configuration lacks an argument."""

    def __init__(self, total, **others):
        super().__init__(**others)
        self.total = total


def test_an_optimizer_without_a_whole_configuration_hides_no_fault():
    optimizer = WithArguments(100, learning_rate=0.1)
    report = looped(
        network(), lambda out, y: 8 * squared(out, y), optimizer=optimizer
    )
    assert faults(report) == [Fault.NEVER_DIVIDED], str(report)


class Weighed(keras.losses.BinaryCrossentropy):
    """A loss whose configuration lacks an argument."""

    def __init__(self, alpha, **others):
        super().__init__(**others)
        self.alpha = alpha

    def call(self, y_true, y_pred):
        return self.alpha * super().call(y_true, y_pred)


def test_a_loss_without_a_whole_configuration_hides_no_fault():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, "sigmoid")])
    loss, data = Weighed(0.3), (X, (Y > 0).astype("float32"))
    assert (
        looped(
            model, lambda out, y: loss(y, out), data=data, loss=loss
        ).findings
        == []
    )
    report = looped(
        model, lambda out, y: loss(y, ops.sigmoid(out)), data=data, loss=loss
    )
    assert faults(report) == [Fault.OTHER_OUTPUTS], str(report)


def test_a_loss_that_counts_its_calls_is_called_after_the_loop_alone():
    calls = []

    def loss(y, outputs):
        calls.append(y)
        return squared(outputs, y)

    model = network()
    with stepcheck.watch(model, (X, Y), loss=loss) as report:
        assert calls == []
        descend(model, squared, (X, Y), 8, by(model.optimizer))
        assert calls == []
    assert report.is_right, str(report)


class Twins(keras.Model):
    """A model with two variables of one path."""

    def build(self, shape):
        self.one = self.add_weight(shape=(5, 8), name="w")
        self.two = self.add_weight(shape=(8, 1), name="w")

    def call(self, x, training=None):
        return ops.matmul(ops.matmul(x, self.one), self.two)


def test_variables_of_one_name_are_told_apart():
    model = Twins()
    model.build((None, 5))
    assert faults(looped(model, lambda out, y: 8 * squared(out, y))) == [
        Fault.NEVER_DIVIDED
    ]


@ONLY_TENSORFLOW
def test_two_optimizers_on_one_batch_apply_no_stale_gradients():
    import tensorflow as tf

    model, optimizers = (
        network(),
        [keras.optimizers.Adam(0.01) for _ in range(2)],
    )
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, (X, Y), loss="mse") as report:
        for epoch in range(2):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(len(X)), 3
            ):
                with tf.GradientTape(persistent=True) as tape:
                    losses = [
                        squared(model(X[part], training=True), Y[part])
                        for part in np.split(rows, 2)
                    ]
                grads = [
                    tape.gradient(loss, model.trainable_variables)
                    for loss in losses
                ]
                for optimizer, own in zip(optimizers, grads, strict=True):
                    optimizer.apply(own)
    assert Fault.GRADIENT_UNLIKE not in faults(report)


@ONLY_TENSORFLOW
def test_a_sum_over_rows_of_unknown_number_is_found():
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function(
        input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])]
    )
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_squared_error(y, model(x, training=True))
        optimizer.apply(
            tape.gradient(loss, model.trainable_variables),
            model.trainable_variables,
        )

    with stepcheck.watch(model, (X, Y)) as report:
        for batch in tf.data.Dataset.from_tensor_slices((X, Y)).batch(8):
            step(*batch)
    assert faults(report) == [Fault.NEVER_DIVIDED]


@ONLY_TENSORFLOW
@pytest.mark.parametrize(
    "clips", [{"clipnorm": 0.5}, {"clipvalue": 0.01}, {"global_clipnorm": 0.5}]
)
def test_the_clips_of_an_optimizer_are_not_those_of_the_loop(clips):
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.Adam(0.01, **clips)
    sums = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = squared(model(x, training=True), y)
        for total, gradient in zip(
            sums, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            total.assign(gradient)
        optimizer.apply(list(sums), model.trainable_variables)

    with stepcheck.watch(model, (X, Y), optimizer=optimizer) as report:
        for epoch in range(2):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(24), 3
            ):
                step(tf.constant(X[rows]), tf.constant(Y[rows]))
    assert report.is_right, str(report)


@pytest.mark.parametrize(
    ("change", "reason", "is_judged"),
    [
        (lambda v, g, norm: 0.01 * g / norm, Reason.CLIPPED_BY_HAND, True),
        (lambda v, g, norm: g + 0.5 * v, Reason.PENALTY_BY_HAND, False),
    ],
)
def test_a_clip_by_hand_is_certified_and_a_penalty_is_not(
    change, reason, is_judged
):
    model = network()
    apply = by(model.optimizer)

    def move(variables, gradients):
        values, gradients = (
            [np.asarray(each) for each in part]
            for part in (variables, gradients)
        )
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        pairs = zip(values, gradients, strict=True)
        apply(variables, [change(v, g, norm) for v, g in pairs])

    with stepcheck.watch(model, (X, Y)) as report:
        descend(model, squared, (X, Y), 8, move)
    assert (faults(report), reasons(report)) == ([], [reason]), str(report)
    assert report.is_right == is_judged


@ONLY_TENSORFLOW  # JAX has numbers of 64 bits only if it is set so at its beginning
@pytest.mark.parametrize("found", [[], [Fault.BROADCAST]])
def test_loops_in_float64_are_judged(found):
    keras.config.set_floatx("float64")
    data = X.astype("float64"), Y.astype("float64")
    value = (lambda out, y: squared(out, y[:, 0])) if found else squared
    report = looped(network(), value, data=data)
    assert faults(report) == found, str(report)
    assert Stage.GRADIENT in report.judged


@pytest.mark.skipif(
    ENGINE != "jax", reason="the values are held outside of the model"
)
def test_a_loop_that_gives_the_models_values_away_is_judged_all_the_same():
    import jax

    model = network()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, slots, x, y):
        def loss(params):
            return squared(
                model.stateless_call(params, [], x, training=True)[0], y
            )

        return model.optimizer.stateless_apply(
            slots, jax.grad(loss)(params), params
        )

    with stepcheck.watch(model, (X, Y)) as report:
        state = (
            [v.value for v in model.trainable_variables],
            [v.value for v in model.optimizer.variables],
        )
        for epoch in range(2):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(24), 3
            ):
                state = step(*state, X[rows], Y[rows])
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


@pytest.mark.skipif(ENGINE != "jax", reason="stateless steps")
@pytest.mark.parametrize("is_reset", [True, False])
def test_stateless_steps_have_their_own_state(is_reset):
    import jax

    model = network(keras.optimizers.Adam(0.01))

    @jax.jit
    def step(weights, slots, x, y):
        def loss(weights):
            return squared(
                model.stateless_call(weights, [], x, training=True)[0], y
            )

        return model.optimizer.stateless_apply(
            slots, jax.grad(loss)(weights), weights
        )

    first = [v.value for v in model.optimizer.variables]
    weights, slots = [v.value for v in model.trainable_variables], first
    with stepcheck.watch(model, (X, Y)) as report:
        for epoch in range(3):
            slots = first if is_reset else slots
            for rows in np.split(
                np.random.default_rng(epoch).permutation(24), 3
            ):
                weights, slots = step(weights, slots, X[rows], Y[rows])
        for variable, value in zip(
            model.trainable_variables, weights, strict=True
        ):
            variable.assign(value)
    assert faults(report) == [Fault.OPTIMIZER_STATE_THROWN_AWAY] * is_reset, (
        str(report)
    )


def test_a_step_that_is_skipped_by_a_limit_is_no_fault():
    model, outlier = network(), Y.copy()
    outlier[5] = 50.0
    gradient = gradient_of(model, squared)
    with stepcheck.watch(model, (X, outlier), loss="mse") as report:
        for epoch in range(3):
            for rows in np.split(
                np.random.default_rng(epoch).permutation(len(X)), 4
            ):
                grads = gradient(X[rows], outlier[rows])
                if max(np.abs(np.asarray(g)).max() for g in grads) < 5:
                    by(model.optimizer)(model.trainable_variables, grads)
    assert Stage.GRADIENT not in {found.stage for found in report.findings}, (
        str(report)
    )
    assert Reason.CHANGED_BY_HAND in reasons(report), str(report)


def test_losses_of_two_outputs_may_be_applied_in_turn():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(
        inputs, [layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
    )
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
    model.optimizer.build(model.trainable_variables)
    data = X, Y, Y + 1

    def of(place):
        def value(outputs, *labels):
            return squared(outputs[place], labels[place]) + 0 * ops.sum(
                outputs[1 - place]
            )

        return value

    gradients = [gradient_of(model, of(place)) for place in (0, 1)]
    with stepcheck.watch(model, (X, [Y, Y + 1])) as report:
        for epoch in range(2):
            for i, rows in enumerate(
                np.split(np.random.default_rng(epoch).permutation(24), 4)
            ):
                grads = gradients[i % 2](*(part[rows] for part in data))
                by(model.optimizer)(model.trainable_variables, grads)
    assert report.findings == [], str(report)
    assert {*reasons(report)} == {Reason.IN_TURN}, str(report)
