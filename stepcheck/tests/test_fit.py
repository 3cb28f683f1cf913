"""Right loops of `fit`: weights of rows, masks, loss scales, layers and losses of the user's own are never accused."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from small import X, Y, network, reasons

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason

ENGINE = keras.backend.backend()
ONLY_TENSORFLOW = pytest.mark.skipif(
    ENGINE != "tensorflow", reason="the loop is TensorFlow's"
)
SIGNS = (Y > 0).astype("float32")
WEIGHTS = np.linspace(0.5, 2, len(X))


def fitted(model, x=X, y=Y, given=None, epochs=2, **others):
    """Return the report of a `fit`, of `given` data if they are not those of the loop."""
    with stepcheck.watch(model, given or (x, y)) as report:
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, **others)
    return report


def classifier(loss="binary_crossentropy", optimizer="sgd"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(1, "sigmoid")]
    )
    model.compile(optimizer, loss)
    return model


class WithPenalty(keras.Sequential):
    """A model that adds a penalty to its compiled loss."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return super().compute_loss(
            x, y, y_pred, sample_weight, training
        ) + 0.1 * ops.mean(y_pred**2)


class OwnStep(keras.Sequential):
    """A model whose step calls that of Keras."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


@pytest.mark.parametrize("kind", [keras.Sequential, WithPenalty, OwnStep])
@pytest.mark.parametrize("num", [None, 3])
def test_a_fit_is_certified(kind, num):
    """Also with microbatches, a penalty, a custom `train_step` and `compute_loss`."""
    keras.utils.set_random_seed(1)
    model = kind(
        [
            keras.Input((5,)),
            layers.Dense(3, "tanh", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.01, gradient_accumulation_steps=num), "mse"
    )
    report = fitted(model)
    assert report.is_right, str(report)
    assert report.as_json()["updates"] == 6 // (num or 1)


def test_the_weights_of_classes_that_fit_gets_are_those_that_are_meant():
    assert fitted(classifier(), y=SIGNS, class_weight={0: 1.0, 1: 5.0}).is_right


def test_the_weights_of_rows_that_fit_gets_are_to_be_stated():
    report = fitted(network(), sample_weight=WEIGHTS)
    assert report.findings == []
    assert Reason.WEIGHTS_NOT_STATED in reasons(report)
    assert Stage.GRADIENT not in report.judged
    assert fitted(
        network(), given=(X, Y, WEIGHTS), sample_weight=WEIGHTS
    ).is_right


@pytest.mark.parametrize("more", [WEIGHTS, 0.0])
def test_a_fit_with_other_weights_of_rows_ends_the_loop(more):
    model, weights = network(), np.ones(len(X))
    with stepcheck.watch(model, (X, Y)) as report:
        model.predict(X, verbose=0)
        model(X[:2])
        model.fit(X, Y, batch_size=8, sample_weight=weights, verbose=0)
        weights += more  # in place
        model.fit(X, Y, batch_size=8, sample_weight=weights, verbose=0)
    assert report.findings == [], str(report)
    assert (Reason.OTHER_WEIGHTS in reasons(report)) == bool(np.any(more))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(1e-3, loss_scale_factor=1024.0),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), 1024.0
        ),
        lambda: keras.optimizers.AdamW(
            0.01, weight_decay=0.1, global_clipnorm=0.5
        ),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.1, 8),
            momentum=0.9,
            nesterov=True,
        ),
    ],
)
def test_what_an_optimizer_of_keras_does_is_no_fault(optimizer):
    report = fitted(network(optimizer()))
    assert report.is_right, str(report)


def test_steps_that_averages_overwrite_are_not_judged():
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=3
    )
    report = fitted(network(optimizer))
    assert (report.findings, Stage.STEP in report.judged) == ([], False), str(
        report
    )


def test_a_fit_in_mixed_precision_is_right():
    keras.config.set_dtype_policy("mixed_float16")
    model = network(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 1024.0)
    )
    report = fitted(model)
    assert report.findings == [], str(report)
    assert Stage.GRADIENT in report.judged


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_gradients_that_are_not_finite_are_not_judged(value):
    x = np.full_like(X, value)
    model = network(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        if np.isnan(value)
        else None
    )
    report = fitted(model, x)
    assert report.findings == []
    assert Stage.GRADIENT not in report.judged


def test_an_unreduced_loss_means_its_mean():
    model = classifier()
    with stepcheck.watch(
        model, (X, SIGNS), loss=keras.losses.BinaryCrossentropy(reduction=None)
    ) as report:
        model.fit(X, SIGNS, batch_size=8, epochs=2, verbose=0)
    assert report.is_right


class Tokens(layers.Embedding):
    """An embedding that makes its own mask."""

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_mask_that_a_layer_makes_is_that_of_the_loss(is_kept):
    x = np.random.default_rng(0).integers(1, 9, (24, 6)).astype("int32")
    x[np.arange(6) > np.arange(24)[:, None] % 5] = 0
    tokens = Tokens(9, 4)
    tokens.supports_masking = is_kept  # else Keras leaves the mask out
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), tokens, layers.Dense(9)]
    )
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    report = fitted(model, x, 8 - x)
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


@pytest.mark.slow
def test_a_number_for_a_batch_is_not_masked():
    def masked(y, out):
        weights = ops.cast(y >= 0, "float32")
        return ops.sum((y - out) ** 2 * weights) / ops.sum(weights)

    tokens = np.tril(np.full((24, 6), 3))
    labels = np.where(tokens > 0, tokens % 2, -1).astype("float32")
    keras.utils.set_random_seed(3)
    sequence = [
        layers.Embedding(8, 4, mask_zero=True),
        layers.GRU(4, return_sequences=True),
        layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *sequence])
    model.compile("sgd", masked)
    report = fitted(model, tokens, labels)
    assert (report.findings, Stage.GRADIENT in report.judged) == ([], True), (
        str(report)
    )


def test_a_layer_that_sets_its_own_weights_is_no_fault():
    parts = [layers.SpectralNormalization(layers.Dense(8)), layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile("sgd", "mse")
    report = fitted(model)
    assert report.findings == []
    assert (Reason.MOVING in reasons(report)) == (ENGINE == "tensorflow"), str(
        report
    )  # by the moved weights, there


def test_rows_of_numbers_that_the_loop_makes_columns_are_judged():
    x = np.linspace(-1, 1, 32, dtype="float32")
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    assert fitted(model, x[:, None], 2 * x[:, None], (x, 2 * x)).is_right


@ONLY_TENSORFLOW
@pytest.mark.parametrize("shape", [(), (1,)])
def test_rows_of_text_are_found(shape):
    import tensorflow as tf

    words = ["one", "two", "three", "four"]
    texts = np.array(
        [f"{words[i % 4]} {words[i // 8]} w{i}" for i in range(24)], object
    )
    split = layers.TextVectorization(output_mode="multi_hot", vocabulary=words)
    model = keras.Sequential(
        [keras.Input(shape, dtype="string"), split, layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    texts = texts.reshape(24, *shape)
    with stepcheck.watch(model, (texts, Y)) as report:
        for _ in range(2):
            order = np.random.permutation(24)
            parts = tf.data.Dataset.from_tensor_slices(
                (texts[order], Y[order])
            ).batch(8)
            model.fit(parts, shuffle=False, verbose=0)
    assert report.is_right, str(report)


class InTime(layers.Layer):
    """Returns the last state of a GRU over the places."""

    def build(self, shape):
        self.cell = layers.GRU(4)
        self.cell.build((None, shape[1], 1))

    def call(self, x):
        return self.cell(ops.reshape(x, (ops.shape(x)[0], x.shape[1], 1)))


class Unsized(layers.Layer):
    """Returns rows whose length nobody knows."""

    def call(self, x):
        return ops.reshape(x, (ops.shape(x)[0], -1))

    def compute_output_spec(self, x):
        return keras.KerasTensor((None, None))


@pytest.mark.parametrize(
    "parts", [[InTime(), layers.Dense(1)], [layers.Dense(1), Unsized()]]
)
def test_layers_of_the_users_own_are_judged(parts):
    inputs = outputs = keras.Input((5,))
    for part in parts:
        outputs = part(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", lambda y, out: ops.mean((y - out) ** 2))
    report = fitted(model)
    assert report.is_right, str(report)


def test_statistics_and_seeds_of_fit_are_right():
    keras.utils.set_random_seed(3)
    middle = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.4)]
    model = keras.Sequential([keras.Input((5,)), *middle, layers.Dense(1)])
    model.compile("adam", "mse")
    with stepcheck.watch(model, (X, Y)) as report:
        model.evaluate(X, Y, verbose=0)
        model.fit(
            X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0
        )
    assert report.is_right, str(report)


@ONLY_TENSORFLOW
@pytest.mark.slow
def test_a_fit_on_two_replicas_that_validates_is_right():
    import tensorflow as tf

    reduction = tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=reduction
    ).scope():
        model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.evaluate(X, Y, verbose=0)
        model.fit(
            X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0
        )
    assert report.is_right, str(report)


def test_the_numbers_of_a_proof_are_those_of_the_loop_for_sparse_gradients():
    random, labels = np.random.default_rng(0), np.arange(12, dtype="float32")
    x = random.integers(0, 12, 48)
    model = keras.Sequential(
        [
            keras.Input((), dtype="int32"),
            layers.Embedding(12, 2),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        lambda y, out: (y - ops.reshape(out, (1, -1))) ** 2,
    )
    with stepcheck.watch(model, (x, labels[x][:, None]), loss="mse") as report:
        model.fit(x, labels[x][:, None], batch_size=16, epochs=2, verbose=0)
    (found,) = report.findings
    assert found.fault is Fault.BROADCAST
    for number in found.proof.numbers:
        assert number.observed == pytest.approx(number.with_error, rel=1e-3), (
            number
        )
