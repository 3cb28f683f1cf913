"""The time of an epoch of ordinary models, small, as they are found in tutorials: ours against
Keras' `fit`.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import wholestep as ws
from benchmarks.language import Language, same_start

_BATCH = 10
_UPDATES = 80
_SECONDS = 20.0  # of one model in one round

Tree = Any


def vit() -> tuple[keras.Model, Tree, Tree]:
    """Return a vision Transformer: patches by a convolution, attention, and a head."""
    images = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 64))(layers.Conv2D(64, 4, strides=4)(images))
    x += layers.Embedding(64, 64)(ops.arange(64))
    for _ in range(4):
        seen = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, 16, dropout=0.1)(seen, seen)
        hidden = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(64)(layers.Dropout(0.1)(hidden))
    out = layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x)))
    return _compiled(images, out, keras.optimizers.AdamW(1e-3)), *_images(32, 10)


def residual() -> tuple[keras.Model, Tree, Tree]:
    """Return a residual network with batch normalization."""
    images = keras.Input((32, 32, 3))
    x = _normed(images, 16)
    for num_filters, strides in ((16, 1), (32, 2), (64, 2)):
        inner = layers.Conv2D(num_filters, 3, padding="same", use_bias=False)(
            _normed(x, num_filters, strides)
        )
        short = (
            x if strides == 1 else layers.Conv2D(num_filters, 1, strides=strides, use_bias=False)(x)
        )
        x = layers.ReLU()(short + layers.BatchNormalization()(inner))
    out = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return _compiled(images, out, keras.optimizers.SGD(0.05, momentum=0.9)), *_images(32, 10)


def mobile() -> tuple[keras.Model, Tree, Tree]:
    """Return a network of depthwise separable convolutions."""
    images = keras.Input((32, 32, 3))
    x = _normed(images, 16)
    for num_filters, strides in ((32, 2), (64, 2), (64, 1)):
        x = layers.DepthwiseConv2D(3, strides=strides, padding="same", use_bias=False)(x)
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        x = _normed(x, num_filters, size=1)
    out = layers.Dense(10)(layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x)))
    return _compiled(images, out, keras.optimizers.Adam()), *_images(32, 10)


def u_net() -> tuple[keras.Model, Tree, Tree]:
    """Return a U-Net for segmentation."""
    images = keras.Input((32, 32, 3))
    out = layers.Conv2D(3, 1)(_u_net(images, (16, 32, 64)))
    x, _ = _images(32, 10)
    y = np.random.default_rng(2).integers(0, 3, x.shape[:3], np.int32)
    return _compiled(images, out, keras.optimizers.Adam()), x, y


def wavenet() -> tuple[keras.Model, Tree, Tree]:
    """Return a WaveNet: gated, dilated, causal convolutions of a series."""
    series = keras.Input((256, 1))
    x = layers.Conv1D(16, 1)(series)
    skips = []
    for dilation in (1, 2, 4, 8, 16, 32):
        gates = [
            layers.Conv1D(16, 2, padding="causal", dilation_rate=dilation, activation=how)(x)
            for how in ("tanh", "sigmoid")
        ]
        inner = layers.Conv1D(16, 1)(layers.Multiply()(gates))
        skips.append(inner)
        x += inner
    out = layers.Conv1D(1, 1)(
        layers.Conv1D(32, 1, activation="relu")(layers.ReLU()(layers.add(skips)))
    )
    model = keras.Model(series, out)
    model.compile(keras.optimizers.Adam(), "mse")
    values = np.random.default_rng(1).normal(size=(_BATCH * _UPDATES, 257, 1)).astype(np.float32)
    return model, values[:, :-1], values[:, 1:]


def conv_lstm() -> tuple[keras.Model, Tree, Tree]:
    """Return a network that predicts the next frame of a film."""
    film = keras.Input((4, 8, 8, 1))
    x = layers.ConvLSTM2D(8, 3, padding="same", return_sequences=True)(film)
    x = layers.ConvLSTM2D(8, 3, padding="same")(layers.BatchNormalization()(x))
    model = keras.Model(film, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(), "binary_crossentropy")
    frames = np.random.default_rng(1).random((_BATCH * _UPDATES, 5, 8, 8, 1), np.float32)
    return model, frames[:, :-1], frames[:, -1]


class Diffusion(keras.Model):
    """Learns to predict the noise of an image; its `train_step` also averages the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = _denoiser(), _denoiser()
        self.average.set_weights(self.network.get_weights())
        self.average.trainable = False
        self.seeds = keras.random.SeedGenerator(1)
        self.noise_loss = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self) -> list:
        """The loss alone."""
        return [self.noise_loss]

    def call(self, inputs: Tree, training: bool = False) -> Tree:
        """Return the predicted noise of (images, variance of the noise)."""
        return (self.network if training else self.average)(inputs, training=training)

    def noised(self, images: Tree) -> tuple[Tree, Tree]:
        """Return the inputs of the network, and the noise."""
        noise = keras.random.normal(ops.shape(images), seed=self.seeds)
        angle = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), 0.02, 1.5, seed=self.seeds)
        return (ops.cos(angle) * images + ops.sin(angle) * noise, ops.square(ops.sin(angle))), noise

    def train_step(self, *arguments: Tree) -> Tree:
        """Return the results of one update, and on JAX the state."""
        return (
            self._on_jax(*arguments)
            if keras.backend.backend() == "jax"
            else self._in_place(*arguments)
        )

    def _in_place(self, images: Tree) -> Tree:
        import tensorflow as tf

        images = images[0] if isinstance(images, tuple) else images
        inputs, noise = self.noised(images)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.abs(noise - self.network(inputs, training=True)))
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.noise_loss.update_state(loss)
        for mean, weight in zip(self.average.weights, self.network.weights, strict=True):
            mean.assign(0.999 * mean + 0.001 * weight)
        return {"loss": self.noise_loss.result()}

    def _on_jax(self, state: Tree, data: Tree) -> Tree:
        import jax

        params, others, slots, metrics = state
        images = data[0] if isinstance(data, tuple) else data

        def share(params: list, others: list) -> tuple[Tree, list]:
            trained = zip(self.trainable_variables, params, strict=True)
            pairs = [*trained, *zip(self.non_trainable_variables, others, strict=True)]
            with keras.StatelessScope(pairs) as scope:
                inputs, noise = self.noised(images)
                loss = ops.mean(ops.abs(noise - self.network(inputs, training=True)))
            after = [scope.get_current_value(v) for v in self.non_trainable_variables]
            return loss, [
                old if new is None else new for old, new in zip(others, after, strict=True)
            ]

        (loss, others), grads = jax.value_and_grad(share, has_aux=True)(params, others)
        params, slots = self.optimizer.stateless_apply(slots, grads, params)
        metrics = self.noise_loss.stateless_update_state(metrics, loss)
        known = {id(v): value for v, value in zip(self.trainable_variables, params, strict=True)}
        known |= {
            id(v): value for v, value in zip(self.non_trainable_variables, others, strict=True)
        }
        means = {
            id(mean): 0.999 * known[id(mean)] + 0.001 * known[id(weight)]
            for mean, weight in zip(self.average.weights, self.network.weights, strict=True)
        }
        others = [means.get(id(v), known[id(v)]) for v in self.non_trainable_variables]
        return {"loss": self.noise_loss.stateless_result(metrics)}, (params, others, slots, metrics)


def diffusion() -> tuple[keras.Model, Tree, Tree]:
    """Return a diffusion model with its own `train_step`."""
    model = Diffusion()
    model.compile(keras.optimizers.AdamW(1e-3))
    return model, _images(16, 10)[0], None


class Autoencoder(keras.Model):
    """A variational autoencoder that adds its divergence to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(16),
            ]
        )
        self.decoder = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(7 * 7 * 32, activation="relu"),
                layers.Reshape((7, 7, 32)),
                layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ]
        )
        self.seeds = keras.random.SeedGenerator(1)
        self.built = True

    def call(self, images: Tree) -> Tree:
        """Return the logits of the pixels."""
        mean, log_variance = ops.split(self.encoder(images), 2, axis=-1)
        self.add_loss(
            -0.001 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        )
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(0.5 * log_variance) * noise)


def autoencoder() -> tuple[keras.Model, Tree, Tree]:
    """Return a variational autoencoder of images."""
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(), keras.losses.BinaryCrossentropy(from_logits=True))
    x, _ = _images(28, 10, 1)
    return model, x, x


def sentiment() -> tuple[keras.Model, Tree, Tree]:
    """Return a bidirectional LSTM of words."""
    words = keras.Input((40,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(32))(layers.Embedding(2000, 32)(words))
    x = layers.Dense(10)(layers.Dropout(0.2)(x))
    random = np.random.default_rng(1)
    x_ = random.integers(0, 2000, (_BATCH * _UPDATES, 40), np.int32)
    y = random.integers(0, 10, _BATCH * _UPDATES)
    return _compiled(words, x, keras.optimizers.Adam()), x_, y


def language() -> tuple[keras.Model, Tree, Tree]:
    """Return a small language model."""
    num = _BATCH * _UPDATES
    work = Language(
        1000, width=64, num_layers=2, length=32, batch_size=_BATCH, num_rows=num, quick_rows=num
    )
    data = work.data(quick=False)
    return work.model(), data["x"], data["y"]


MODELS: dict[str, Callable[[], tuple[keras.Model, Tree, Tree]]] = {
    "ViT": vit,
    "residual": residual,
    "MobileNet": mobile,
    "U-Net": u_net,
    "WaveNet": wavenet,
    "ConvLSTM": conv_lstm,
    "diffusion": diffusion,
    "VAE": autoencoder,
    "LSTM": sentiment,
    "Transformer": language,
}


def measure(model: str, rounds: int, quick: bool) -> dict[str, list[float]]:
    """Return for ours and for Keras the seconds of an epoch of 80 updates, in turns, warm: one
    median a round.
    """
    same_start()
    mine, x, y = MODELS[model]()
    same_start()
    keras_model, *_ = MODELS[model]()
    trainer = ws.Trainer(mine)
    how: dict[str, Any] = {"batch_size": _BATCH, "epochs": 1, "verbose": 0}
    runs = {
        "wholestep": lambda: trainer.fit(x, y, **how),
        "Keras fit": lambda: keras_model.fit(x, y, **how),
    }
    for run in [*runs.values()] * 2:
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        turns: dict[str, list[float]] = {name: [] for name in runs}
        begin = time.perf_counter()
        while not turns["Keras fit"] or (time.perf_counter() - begin < _SECONDS and not quick):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                turns[name].append(time.perf_counter() - start)
        for name, found in turns.items():
            times[name].append(median(found))
    return times


def _compiled(inputs: Any, logits: Any, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Model(inputs, logits)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _images(size: int, num_classes: int, num_channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    num = _BATCH * _UPDATES
    return random.random((num, size, size, num_channels), np.float32), random.integers(
        0, num_classes, num, np.int32
    )


def _normed(x: Any, num_filters: int, strides: int = 1, size: int = 3) -> Any:
    x = layers.Conv2D(num_filters, size, strides=strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def _u_net(x: Any, widths: tuple[int, ...]) -> Any:
    x = layers.Conv2D(widths[0], 3, padding="same", activation="relu")(x)
    x = layers.Conv2D(widths[0], 3, padding="same", activation="relu")(x)
    if not widths[1:]:
        return x
    up = layers.UpSampling2D()(_u_net(layers.MaxPooling2D()(x), widths[1:]))
    x = layers.Concatenate()(
        [x, layers.Conv2D(widths[0], 2, padding="same", activation="relu")(up)]
    )
    return layers.Conv2D(widths[0], 3, padding="same", activation="relu")(x)


def _denoiser() -> keras.Model:
    images = keras.Input((16, 16, 3))
    variance = keras.Input((1, 1, 1))
    level = layers.UpSampling2D(16)(layers.Conv2D(8, 1, activation="silu")(variance))
    x = _u_net(layers.Concatenate()([images, level]), (16, 32, 48))
    return keras.Model([images, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))
