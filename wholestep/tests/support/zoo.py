"""Small models of the kinds that users bring, each with its data. No two of them are trained
by one path.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from exact import spread_over
from keras import layers as L  # noqa: N812
from keras import ops

ROWS = 12
BATCH = 6
RNG = np.random.default_rng(0)


def real(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


def whole(limit, *shape, low=0):
    return RNG.integers(low, limit, (ROWS, *shape)).astype("int32")


VECTORS = real(4)
SERIES = real(4, 2)
LONG = real(6, 2)
IMAGES = real(4, 4, 2)
VOLUMES = real(3, 3, 3, 1)
TARGETS = real(2)
OTHERS = real(1)
EACH = real(4, 2)
LABELS = whole(3)
TOKENS = whole(7, 4, low=1)
# uneven: the rest of a row is padding
TOKENS[np.arange(4)[None] >= RNG.integers(1, 5, ROWS)[:, None]] = 0
TAGS = whole(3, 4)


class Kind(NamedTuple):
    """The construction of a model, and its data.

    Args:
        make: returns the model.
        y: the labels; None for a model that adds its own losses.
        compile: the arguments of `compile`, over those of `compiled`.
        draws: it draws random numbers in training: other ones than Keras would.
        couples: rows of a batch see each other in training: what a cut means differs from the whole
            batch.
        large: it is tried among the larger runs alone: one much like it is tried always.
        differs: by engine and check ("jax arrays", "* cut"): where it is known to differ, and why.
        unlike: numbers of an epoch and an evaluation that Keras weighs otherwise
            (docs/differences.md).
        more: numbers that Keras does not tell.
        tol: what rounding may do.
    """

    make: Callable[[], keras.Model]
    x: Any
    y: Any
    compile: dict[str, Callable]
    draws: bool = False
    couples: bool = False
    large: bool = False
    differs: dict[str, str] = {}
    unlike: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    tol: float = 2e-6

    def compiled(self, replicas=None, **more):
        """Return the model, with names and weights that are the same each time."""
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        how = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": lambda: "mse"} | self.compile
        with spread_over(replicas):
            model = self.make()
            model.compile(**{name: value() for name, value in how.items()}, **more)
        return model


KINDS: dict[str, Kind] = {}


def kind(
    x,
    y,
    *,
    draws=False,
    couples=False,
    large=False,
    differs=None,
    unlike=(),
    more=(),
    tol=2e-6,
    **compile_with,
):
    """Register the model that a function returns, under its name in words."""

    def register(make):
        name = make.__name__.replace("_", " ").strip()
        made = {k: v if callable(v) else (lambda v=v: v) for k, v in compile_with.items()}
        KINDS[name] = Kind(
            make, x, y, made, draws, couples, large, differs or {}, unlike, more, tol
        )
        return make

    return register


def chain(x, *layers):
    """Return a Sequential model for these inputs."""
    return keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *layers])


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam():
    return keras.optimizers.Adam(0.01)


# ---- recurrent ----


@kind(SERIES, TARGETS, metrics=lambda: ["mae"], large=True)
def simple_rnn():
    return chain(SERIES, L.SimpleRNN(3), L.Dense(2))


@kind(SERIES, EACH, optimizer=adam, large=True)
def gru():
    return chain(SERIES, L.GRU(3, return_sequences=True), L.Dense(2))


@kind(SERIES, TARGETS)
def lstm():
    return chain(SERIES, L.LSTM(3), L.Dense(2))


@kind(SERIES, LABELS, loss=classes, metrics=lambda: ["accuracy"], large=True)
def bidirectional():
    return chain(SERIES, L.Bidirectional(L.GRU(2)), L.Dense(3))


KEPT = "on JAX, Keras' fit and evaluate drop the state of a stateful layer"
STATEFUL = {f"jax {check}": KEPT for check in ("arrays", "evaluation", "stream")}
APART = (
    "a stateful layer holds the state of a whole batch, of which a replica of a strategy sees "
    "its own rows alone"
)
FIXED = {f"tensorflow {check}": APART for check in ("replicas", "replicas in microbatches")}


@kind(SERIES, TARGETS, couples=True, differs=STATEFUL | FIXED)
def stateful_rnn():
    inputs = keras.Input(batch_shape=(BATCH, *SERIES.shape[1:]))
    return keras.Model(inputs, L.Dense(2)(L.SimpleRNN(2, stateful=True)(inputs)))


@kind(SERIES, TARGETS, draws=True, large=True)
def recurrent_dropout():
    return chain(SERIES, L.LSTM(3, dropout=0.2, recurrent_dropout=0.2), L.Dense(2))


@kind({"source": SERIES, "target": SERIES[:, ::-1].copy()}, EACH, large=True)
def encoder_and_decoder():
    source = keras.Input((4, 2), name="source")
    target = keras.Input((4, 2), name="target")
    *_, hidden, carry = L.LSTM(2, return_state=True)(source)
    out = L.LSTM(2, return_sequences=True)(target, initial_state=[hidden, carry])
    return keras.Model({"source": source, "target": target}, L.TimeDistributed(L.Dense(2))(out))


@kind(real(2, 3, 1), TARGETS, large=True)
def conv_lstm():
    return keras.Sequential([keras.Input((2, 3, 1)), L.ConvLSTM1D(1, 2), L.Flatten(), L.Dense(2)])


# ---- convolutions ----


@kind(LONG, TARGETS, large=True)
def conv_1d():
    return chain(LONG, L.Conv1D(3, 2, activation="relu"), L.GlobalMaxPooling1D(), L.Dense(2))


@kind(
    IMAGES,
    LABELS,
    loss=classes,
    metrics=lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
)
def conv_2d():
    return chain(
        IMAGES, L.Conv2D(3, 2, activation="relu"), L.MaxPooling2D(2), L.Flatten(), L.Dense(3)
    )


@kind(VOLUMES, TARGETS, large=True)
def conv_3d():
    return chain(VOLUMES, L.Conv3D(2, 2, activation="relu"), L.Flatten(), L.Dense(2))


@kind(IMAGES, IMAGES, large=True)
def u_net():
    inputs = keras.Input(IMAGES.shape[1:])
    down = L.Conv2D(2, 2, strides=2, activation="relu")(inputs)
    up = L.Concatenate()([inputs, L.UpSampling2D()(down), L.Conv2DTranspose(1, 2, strides=2)(down)])
    return keras.Model(inputs, L.Conv2D(2, 1)(up))


@kind(IMAGES, LABELS, loss=classes, couples=True)
def mobile_block():
    inputs = keras.Input(IMAGES.shape[1:])
    out = L.ReLU(6.0)(L.BatchNormalization(momentum=0.5)(L.Conv2D(3, 1, use_bias=False)(inputs)))
    out = L.DepthwiseConv2D(2, padding="same", use_bias=False)(out)
    out = L.Add()([inputs, L.Conv2D(2, 1)(L.ReLU(6.0)(L.BatchNormalization(momentum=0.5)(out)))])
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(out)))


# ---- attention, embeddings, masks ----


@kind(SERIES, EACH)
def attention():
    inputs = keras.Input(SERIES.shape[1:])
    out = L.LayerNormalization()(
        inputs + L.MultiHeadAttention(2, 2)(inputs, inputs, use_causal_mask=True)
    )
    return keras.Model(inputs, L.EinsumDense("abc,cd->abd", output_shape=(None, 2))(out))


@kind(TOKENS, LABELS, loss=classes)
def embedding_with_mask():
    return chain(TOKENS, L.Embedding(7, 2, mask_zero=True), L.GRU(2), L.Dense(3))


@kind(TOKENS, TAGS, loss=classes, unlike=("loss",))
def tagger_with_mask():
    return chain(TOKENS, L.Embedding(7, 2, mask_zero=True), L.Dense(3))


@kind(TOKENS, LABELS, loss=classes, large=True)
def bag_of_words():
    return chain(TOKENS, L.Embedding(7, 3), L.GlobalAveragePooling1D(), L.Dense(3))


# ---- normalization and noise ----


@kind(VECTORS, TARGETS, couples=True)
def batch_normalization():
    return chain(VECTORS, L.Dense(3), L.BatchNormalization(momentum=0.5), L.Dense(2))


@kind(VECTORS, TARGETS, draws=True)
def dropout():
    return chain(VECTORS, L.Dense(4), L.Dropout(0.3), L.Dense(2))


@kind(VECTORS, TARGETS, draws=True, large=True)
def gaussian_noise():
    return chain(VECTORS, L.GaussianNoise(0.3), L.Dense(2))


MOVED = (
    "what a layer assigns to its kernel does not add up over the replicas of tf.distribute: refused"
)


@kind(
    VECTORS,
    TARGETS,
    differs={f"tensorflow replicas{cut}": MOVED for cut in ("", " in microbatches")},
)
def spectral_normalization():
    return chain(VECTORS, L.SpectralNormalization(L.Dense(3)), L.Dense(2))


@kind(VECTORS, TARGETS, large=True)
def adapted_normalization():
    normalize = L.Normalization()
    normalize.adapt(VECTORS)
    return chain(VECTORS, normalize, L.Dense(2))


@kind(IMAGES, TARGETS, draws=True)
def augmentation():
    return chain(
        IMAGES, L.RandomFlip(), L.RandomBrightness(0.2, value_range=(0, 1)), L.Flatten(), L.Dense(2)
    )


# ---- several inputs and outputs ----


@kind(
    [VECTORS, SERIES],
    [TARGETS, OTHERS],
    loss=lambda: ["mse", "mae"],
    loss_weights=lambda: [1.0, 0.5],
    large=True,
)
def lists():
    a = keras.Input((4,))
    b = keras.Input((4, 2))
    joint = L.Concatenate()([L.Dense(2)(a), L.Flatten()(b)])
    return keras.Model([a, b], [L.Dense(2)(joint), L.Dense(1)(joint)])


@kind(
    {"a": VECTORS, "b": SERIES},
    {"p": TARGETS, "q": LABELS},
    loss=lambda: {"p": "mse", "q": classes()},
    metrics=lambda: {"q": ["accuracy"], "p": ["mae", "mse"]},
)
def dicts():
    a = keras.Input((4,), name="a")
    b = keras.Input((4, 2), name="b")
    joint = L.Concatenate()([L.Dense(2)(a), L.Flatten()(b)])
    return keras.Model(
        {"a": a, "b": b}, {"q": L.Dense(3, name="q")(joint), "p": L.Dense(2, name="p")(joint)}
    )


@kind(
    {"a": (VECTORS, [SERIES])},
    {"p": [TARGETS, OTHERS]},
    loss=lambda: {"p": ["mse", "mae"]},
    large=True,
)
def nested():
    a = keras.Input((4,))
    b = keras.Input((4, 2))
    joint = L.Concatenate()([a, L.Flatten()(b)])
    return keras.Model({"a": (a, [b])}, {"p": [L.Dense(2)(joint), L.Dense(1)(joint)]})


@kind([VECTORS, VECTORS[::-1].copy()], OTHERS)
def shared_layers():
    shared = L.Dense(3, "tanh")
    inputs = [keras.Input((4,)), keras.Input((4,))]
    one, two = (shared(x) for x in inputs)
    return keras.Model(inputs, ops.sum(ops.square(one - two), axis=-1, keepdims=True))


@kind(
    VECTORS,
    [TARGETS, TARGETS + 1],
    loss=lambda: ["mse", "mse"],
    unlike=("out_loss",),
    more=("out_loss_1",),
)
def one_output_twice():
    inputs = keras.Input((4,))
    out = L.Dense(2, name="out")(inputs)
    return keras.Model(inputs, [out, out])


@kind(VECTORS, [TARGETS, OTHERS], loss=lambda: ["mse", None], large=True)
def output_without_a_loss():
    inputs = keras.Input((4,))
    joint = L.Dense(3)(inputs)
    return keras.Model(inputs, [L.Dense(2)(joint), L.Dense(1)(joint)])


# ---- subclassed ----


class WithBuild(keras.Model):
    def build(self, shape):
        self.hidden, self.out = L.Dense(3, "tanh"), L.Dense(2)
        self.hidden.build(shape)
        self.out.build((None, 3))

    def call(self, x):
        return self.out(self.hidden(x))


class WithoutBuild(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.dropout, self.out = L.Dense(3, "tanh"), L.Dropout(0.0), L.Dense(2)

    def call(self, x, training=False):
        return self.out(self.dropout(self.hidden(x), training=training))


class TwoOutputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = L.Dense(2), L.Dense(1)

    def call(self, x):
        return [self.one(x), self.two(x)]


@kind(VECTORS, TARGETS, large=True)
def subclass_with_build():
    return WithBuild()


@kind(VECTORS, TARGETS)
def subclass_without_build():
    return WithoutBuild()


@kind(VECTORS, TARGETS, large=True)
def unbuilt_sequential():
    return keras.Sequential([L.Dense(3), L.Dense(2)])


@kind(
    VECTORS,
    [TARGETS, OTHERS],
    loss=lambda: ["mse", "mse"],
    unlike=("mse_loss",),
    more=("mse_loss_1",),
)
def two_outputs_without_names():
    return TwoOutputs()


class Counting(L.Layer):
    """Counts its training batches, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
        return x / ops.cast(1 + self.seen, x.dtype)


@kind(VECTORS, TARGETS)
def counter():
    return chain(VECTORS, L.Dense(3), Counting(), L.Dense(2))


# ---- custom losses ----


class OnTop(keras.Model):
    """Adds to Keras' loss, as its documentation shows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(y_pred))


class Instead(keras.Model):
    """Leaves Keras' loss and the regularisation out, and does not ask for `training`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ops.mean(ops.abs(y - y_pred))


def _regularised(cls):
    inputs = keras.Input((4,))
    return cls(inputs, L.Dense(2, kernel_regularizer="l2", activity_regularizer="l2")(inputs))


@kind(VECTORS, TARGETS, couples=True, large=True)
def compute_loss_on_top():
    return _regularised(OnTop)


@kind(VECTORS, TARGETS, couples=True)
def compute_loss_instead():
    return _regularised(Instead)


class Adding(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@kind(VECTORS, TARGETS, large=True)
def add_loss():
    return chain(VECTORS, L.Dense(3), Adding(), L.Dense(2))


@kind(VECTORS, None, loss=None)
def add_loss_only():
    return chain(VECTORS, L.Dense(3), Adding())


@kind(VECTORS, TARGETS, large=True)
def activity_regularisers():
    return chain(
        VECTORS, L.Dense(3, activity_regularizer="l2"), L.Dense(2, kernel_regularizer="l1")
    )


class Quantizer(L.Layer):
    """The nearest of a few codes: the gradient goes straight through, and the codes move by losses
    of their own.
    """

    def __init__(self):
        super().__init__()
        self.codes = self.add_weight(shape=(3, 2), initializer="random_normal")

    def call(self, x):
        distances = ops.sum(ops.square(x[:, None] - self.codes), axis=-1)
        code = ops.take(self.codes, ops.argmin(distances, axis=-1), axis=0)
        self.add_loss(ops.mean(ops.square(code - ops.stop_gradient(x))))
        return x + ops.stop_gradient(code - x)


@kind(VECTORS, VECTORS, large=True)
def vector_quantizer():
    return chain(VECTORS, L.Dense(2), Quantizer(), L.Dense(4))


class Sampling(L.Layer):
    """The latent of a variational autoencoder, and its divergence."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)

    def call(self, x):
        mean, log_var = ops.split(x, 2, axis=-1)
        self.add_loss(-0.05 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var)))
        return mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean), seed=self.seed)


@kind(VECTORS, VECTORS, draws=True)
def variational_autoencoder():
    return chain(VECTORS, L.Dense(4), Sampling(), L.Dense(4))


class Reporting(keras.Model):
    """Reports a number in addition to the metrics."""

    def get_metrics_result(self):
        return super().get_metrics_result() | {"twice": 2 * self._loss_tracker.result()}


@kind(VECTORS, TARGETS, metrics=lambda: ["mae"])
def reports_of_its_own():
    inputs = keras.Input((4,))
    return Reporting(inputs, L.Dense(2)(inputs))


# ---- parts that stay, and numbers of other kinds ----


@kind(VECTORS, TARGETS)
def frozen():
    hidden = keras.Sequential([keras.Input((4,)), L.Dense(3), L.BatchNormalization()])
    hidden.trainable = False
    return chain(VECTORS, hidden, L.Dense(2))


@kind(VECTORS, TARGETS)
def lora():
    hidden = L.Dense(3)
    model = chain(VECTORS, hidden, L.Dense(2))
    hidden.enable_lora(1)
    return model


@kind(VECTORS, TARGETS, large=True)
def quantized():
    model = chain(VECTORS, L.Dense(3), L.Dense(2))
    model.layers[0].quantize("int8")
    model.layers[0].enable_lora(1)
    return model


@contextlib.contextmanager
def policy(name):
    keras.config.set_dtype_policy(name)
    yield
    keras.config.set_dtype_policy("float32")


@kind(VECTORS, TARGETS, tol=1e-2)
def mixed_bfloat16():
    with policy("mixed_bfloat16"):
        return chain(VECTORS, L.Dense(3), L.Dense(2, dtype="float32"))


def scaled():
    """Return an optimizer whose loss scale lets nothing overflow, cut or not."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)


@kind(VECTORS, TARGETS, optimizer=scaled, tol=1e-2, large=True)
def mixed_float16():
    with policy("mixed_float16"):
        return chain(VECTORS, L.Dense(3), L.Dense(2))


@kind(VECTORS, TARGETS, large=True)
def float64():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has no 64 bits unless asked, and says so
        return chain(VECTORS, L.Dense(3, dtype="float64"), L.Dense(2))


class Doubling:
    def __call__(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(2 * x, y, sample_weight)


class Task(keras.Model):
    """As a task of keras-hub: its preprocessor runs before its own `fit`, `evaluate` and
    `predict`.
    """

    preprocessor = Doubling()

    def fit(self, x=None, y=None, **arguments):
        return super().fit(*self.preprocessor(x, y)[:2], **arguments)

    def evaluate(self, x=None, y=None, **arguments):
        return super().evaluate(*self.preprocessor(x, y)[:2], **arguments)

    def predict(self, x, **arguments):
        return super().predict(self.preprocessor(x), **arguments)


@kind(VECTORS, TARGETS)
def task_with_preprocessor():
    inputs = keras.Input((4,))
    return Task(inputs, L.Dense(2)(inputs))


class Plus(L.Layer):
    def call(self, x, other=None):
        return x if other is None else x + other


@kind([VECTORS, None], TARGETS)
def optional_input():
    inputs = [keras.Input((4,)), keras.Input((4,), optional=True)]
    return keras.Model(inputs, L.Dense(2)(Plus()(*inputs)))
