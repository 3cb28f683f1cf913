"""Models with custom steps, each written for the running engine."""

import keras
import numpy as np
from keras import ops

L = keras.layers
JAX = keras.backend.backend() == "jax"
draw = np.random.default_rng(5)
X = draw.normal(size=(22, 6)).astype("float32")
Y = (X[:, :1] - X[:, 1:2]).astype("float32")

if JAX:
    import jax
else:
    import tensorflow as tf


def dense(units, seed, activation=None):
    return L.Dense(
        units, activation, kernel_initializer=keras.initializers.GlorotUniform(seed=seed)
    )


def network(num_inputs, num_outputs, seed):
    return keras.Sequential(
        [keras.Input((num_inputs,)), dense(8, seed, "tanh"), dense(num_outputs, seed + 1)]
    )


class Lean(keras.Model):
    """A model of parts, without a `call`; its parts are built, and `built` is set."""

    def __init__(self):
        super().__init__()
        self.make()
        self.built = True


class Encoding(Lean):
    """A variational autoencoder, as in the guides of Keras: custom trackers, a draw, one
    optimizer.
    """

    def make(self):
        self.encoder, self.decoder = network(6, 4, 1), network(2, 6, 3)
        self.seeds = keras.random.SeedGenerator(7)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.loss_tracker, self.kl_tracker]

    def losses_of(self, x, encode, decode):
        mean, log_variance = ops.split(encode(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        output = decode(mean + ops.exp(log_variance / 2) * noise)
        kl = ops.mean(ops.sum((mean**2 + ops.exp(log_variance) - log_variance - 1) / 2, axis=-1))
        return ops.mean(ops.sum((output - x) ** 2, axis=-1)) + kl, kl

    def told(self, loss, kl):
        self.loss_tracker.update_state(loss)
        self.kl_tracker.update_state(kl)
        return {m.name: m.result() for m in self.metrics}

    if JAX:

        def train_step(self, state, data):
            params, buffers, slots, metrics = state
            num = len(self.encoder.trainable_variables)

            def loss_of(params):
                pairs = zip(self.non_trainable_variables, buffers, strict=True)
                with keras.StatelessScope(list(pairs)) as scope:
                    encode, decode = (
                        lambda x, part=part, own=own: part.stateless_call(own, [], x)[0]
                        for part, own in (
                            (self.encoder, params[:num]),
                            (self.decoder, params[num:]),
                        )
                    )
                    loss, kl = self.losses_of(data, encode, decode)
                return loss, (
                    kl,
                    [scope.get_current_value(v) for v in self.non_trainable_variables],
                )

            (loss, (kl, buffers)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            params, slots = self.optimizer.stateless_apply(slots, grads, params)
            with keras.StatelessScope(
                list(zip(self.metrics_variables, metrics, strict=True))
            ) as scope:
                logs = self.told(loss, kl)
            return logs, (
                params,
                buffers,
                slots,
                [scope.get_current_value(v) for v in self.metrics_variables],
            )

    else:

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss, kl = self.losses_of(data, self.encoder, self.decoder)
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_weights), self.trainable_weights
            )
            return self.told(loss, kl)


def encoding():
    model = Encoding()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


class Adversaries(Lean):
    """A generator and a discriminator, each with an optimizer, given to a `compile` of
    the model's own.
    """

    def make(self):
        self.discriminator, self.generator = network(6, 1, 11), network(2, 6, 13)
        self.seeds = keras.random.SeedGenerator(9)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        # Keras' `fit` on JAX keeps what the model tracks, and nothing else, from step to step.
        self.d_optimizer, self.g_optimizer = (
            keras.optimizers.Adam(0.02),
            keras.optimizers.SGD(0.05, momentum=0.5),
        )
        self.d_optimizer.build(self.discriminator.trainable_variables)
        self.g_optimizer.build(self.generator.trainable_variables)
        if self.tracks:
            self.slots = [*self.d_optimizer.variables, *self.g_optimizer.variables]

    tracks = True

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def noise(self, x):
        return keras.random.normal((ops.shape(x)[0], 2), seed=self.seeds)

    def told(self, d_loss, g_loss):
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}

    def d_loss(self, true, made):
        return ops.mean(ops.softplus(-true)) + ops.mean(ops.softplus(made))

    def g_loss(self, made):
        return ops.mean(ops.softplus(-made))

    if JAX:

        def train_step(self, state, data):
            groups = (
                self.trainable_variables,
                self.non_trainable_variables,
                self.optimizer.variables,
            )
            pairs = [
                pair
                for known, given in zip((*groups, self.metrics_variables), state, strict=True)
                for pair in zip(known, given, strict=True)
            ]
            with keras.StatelessScope(pairs) as scope:
                logs = self.both(data)
                after = [
                    [scope.get_current_value(v) for v in known]
                    for known in (*groups, self.metrics_variables)
                ]
            return logs, tuple(after)

        def both(self, x):
            d = self.discriminator
            g = self.generator
            made = g(self.noise(x))
            d_now = [v.value for v in d.trainable_variables]

            def loss_of_d(params):
                true, false = (d.stateless_call(params, [], batch)[0] for batch in (x, made))
                return self.d_loss(true, false)

            d_loss, grads = jax.value_and_grad(loss_of_d)(d_now)
            self.d_optimizer.apply(grads, d.trainable_variables)
            noise = self.noise(x)
            d_now = [v.value for v in d.trainable_variables]

            def loss_of_g(params):
                return self.g_loss(
                    d.stateless_call(d_now, [], g.stateless_call(params, [], noise)[0])[0]
                )

            g_loss, grads = jax.value_and_grad(loss_of_g)([v.value for v in g.trainable_variables])
            self.g_optimizer.apply(grads, g.trainable_variables)
            return self.told(d_loss, g_loss)

    else:

        def train_step(self, x):
            d = self.discriminator
            g = self.generator
            made = g(self.noise(x))
            with tf.GradientTape() as tape:
                d_loss = self.d_loss(d(x), d(made))
            self.d_optimizer.apply(
                tape.gradient(d_loss, d.trainable_variables), d.trainable_variables
            )
            noise = self.noise(x)
            with tf.GradientTape() as tape:
                g_loss = self.g_loss(d(g(noise)))
            self.g_optimizer.apply(
                tape.gradient(g_loss, g.trainable_variables), g.trainable_variables
            )
            return self.told(d_loss, g_loss)


class Untracked(Adversaries):
    """The same, whose optimizers are attributes and nothing more; on JAX, the step assigns as on
    TensorFlow.
    """

    tracks = False

    if JAX:

        def train_step(self, state, data):
            return self.both(data), state


class ByName(Untracked):
    """The same, whose optimizers are in a dict."""

    def make(self):
        self.by_name = {}
        super().make()

    d_optimizer = property(
        lambda self: self.by_name.get("d"), lambda self, made: self.by_name.update({"d": made})
    )
    g_optimizer = property(
        lambda self: self.by_name.get("g"), lambda self, made: self.by_name.update({"g": made})
    )


def adversaries(kind=Adversaries):
    model = kind()
    model.compile()
    return model


class Distilling(keras.Model):
    """A student that learns from a teacher; compiled as any model, with a step and a test of its
    own.
    """

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(6, 1, 21), network(6, 1, 31)
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def agreement(self, x, y_pred):
        return ops.mean((self.teacher(x) - y_pred) ** 2)

    if JAX:

        def train_step(self, state, data):
            params, buffers, slots, metrics = state
            x, y = data
            with keras.StatelessScope(
                list(zip(self.non_trainable_variables, buffers, strict=True))
            ):
                taught = self.teacher(x)

            def loss_of(params):
                y_pred, _ = self.stateless_call(params, buffers, x, training=True)
                return ops.mean((y_pred - y) ** 2) + 0.5 * ops.mean((taught - y_pred) ** 2), y_pred

            (loss, y_pred), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            params, slots = self.optimizer.stateless_apply(slots, grads, params)
            logs, metrics = self._update_metrics_variables(metrics, loss, x, y, y_pred, None)
            return logs, (params, buffers, slots, metrics)

        def test_step(self, state, data):
            logs, state = super().test_step(state, data)
            return {**logs, "half": logs["mae"] / 2}, state

        def predict_step(self, state, data):
            outputs, buffers = super().predict_step(state, data)
            return {"twice": 2 * outputs, "once": outputs}, buffers

    else:

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = ops.mean((y_pred - y) ** 2) + 0.5 * self.agreement(x, y_pred)
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
            self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
            return self.compute_metrics(x, y, y_pred, None)

        def test_step(self, data):
            logs = super().test_step(data)
            return {**logs, "half": logs["mae"] / 2}

        def predict_step(self, data):
            outputs = super().predict_step(data)
            return {"twice": 2 * outputs, "once": outputs}


def distilling():
    model = Distilling()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


class Calling(keras.Model):
    """A step that calls Keras' own, and adds a number; dropout, so that there is something to
    draw.
    """

    def train_step(self, *given):
        found = super().train_step(*given)
        logs = found[0] if JAX else found
        logs["ten"] = 10.0
        return found


def calling(**compiled):
    image = keras.Input((6,))
    hidden = L.BatchNormalization()(dense(8, 41, "tanh")(image))
    model = Calling(image, dense(1, 42)(L.Dropout(0.3, seed=4)(hidden)))
    model.compile(keras.optimizers.Adam(0.01), "mse", **{"metrics": ["mae"]} | compiled)
    return model
