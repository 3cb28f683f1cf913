"""Loops of public questions as they were asked or answered, with what is wrong there and the edits that mend it."""

from dataclasses import dataclass

import keras
import numpy as np
from audit_loops import Loop
from keras import layers

draw = np.random.default_rng(0)
PAIRS = draw.integers(0, 6, (24, 2)).astype("int32")
COUNTS = np.log(draw.integers(1, 100, 24)).astype("float32")
X = draw.normal(size=(20, 4)).astype("float32")
Y = (X @ draw.normal(size=(4, 1))).astype("float32")
CLASSES = np.argmax(X @ draw.normal(size=(4, 3)), axis=1)
LENGTHS = np.arange(5) < draw.integers(1, 6, size=(16, 1))
WORDS = (draw.integers(1, 6, size=(16, 5)) * LENGTHS).astype("int32")
VOCABULARY, SMOOTH = 6, 0.1


@keras.saving.register_keras_serializable("questions")
class Glove(keras.Model):
    """Words as vectors: the product of two, and a bias of each."""

    def __init__(self):
        super().__init__()
        self.target, self.context = (layers.Embedding(6, 3) for _ in range(2))
        self.target_bias, self.context_bias = (layers.Embedding(6, 1) for _ in range(2))
        self.dot = layers.Dot(axes=-1)

    def call(self, inputs):
        t, c = inputs[:, 0], inputs[:, 1]
        return self.dot([self.target(t), self.context(c)]) + self.target_bias(t) + self.context_bias(c)


def glove():
    keras.utils.set_random_seed(0)
    model = Glove()
    model(PAIRS[:1])
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def network(*middle, num=1, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh"), *middle, layers.Dense(num)])
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


def on_replicas(make):
    import tensorflow as tf

    reduction = tf.distribute.ReductionToOneDevice()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduction).scope():
        return make()


def transformer():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    h = layers.Embedding(VOCABULARY, 4)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(1, 4)(h, h, use_causal_mask=True))
    model = keras.Model(inputs, layers.Dense(VOCABULARY)(h))
    model.compile(keras.optimizers.SGD(0.2), masked)
    return model


def masked(real, pred):
    """A smoothed loss of the words that are there, as one number."""
    import tensorflow as tf

    mask = tf.cast(tf.not_equal(real, 0), tf.float32)
    target = tf.one_hot(tf.cast(real, tf.int32), VOCABULARY) * (1 - SMOOTH) + SMOOTH / VOCABULARY
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(target, pred) * mask) / tf.reduce_sum(mask)


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "glove": glove,
    "regression": network,
    "norm": lambda: network(layers.BatchNormalization(), num=3, loss=LOGITS),
    "replicas": lambda: on_replicas(lambda: network(num=3, loss=LOGITS)),
    "words": lambda: on_replicas(transformer),
}
DATA = {
    "glove": (PAIRS, COUNTS),
    "regression": (X, Y),
    "norm": (X, CLASSES),
    "replicas": (X, CLASSES),
    "words": (WORDS, WORDS),
}


@dataclass(frozen=True)
class Question:
    """A loop as it was asked or answered.

    Args:
        causes: their names; `note`: a part of a note that is told too.
        mended: the edits of the text after which nothing is wrong.
    """

    loop: Loop
    causes: tuple[str, ...]
    mended: tuple[tuple[str, str], ...]
    note: str = ""


FIRST = """
def train(model, x, y, w):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24).batch(12)

    @tf.function
    def train_step(pairs, labels):
        with tf.GradientTape() as tape:
            prediction = model(pairs, training=True)
            loss = tf.reduce_mean(tf.math.squared_difference(labels, prediction))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables))

    for epoch in range(2):
        for pairs, labels in dataset:
            train_step(pairs, labels)
"""
SECOND = """
def train(model, x, y, w):
    loss_object = keras.losses.MeanSquaredError()
    train_vars = model.trainable_variables
    n_acum = 2
    n_batches = len(x) // 4
    for epoch in range(2):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(4)
        accum_gradient = [tf.zeros_like(this_var) for this_var in train_vars]
        for i, (xb, yb) in enumerate(dataset):
            with tf.GradientTape() as tape:
                predictions = model(xb, training=True)
                loss_value = loss_object(yb, predictions)
            gradients = tape.gradient(loss_value, train_vars)
            accum_gradient = [(acum_grad + grad) for acum_grad, grad in zip(accum_gradient, gradients)]
            if (i + 1) % n_acum == 0:
                model.optimizer.apply_gradients(zip(accum_gradient, train_vars))
                accum_gradient = [tf.zeros_like(this_var) for this_var in train_vars]
"""
THIRD = """
def train(model, x, y, w):
    lr, batch_size = 0.1, 5
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for epoch in range(2):
        order = np.random.permutation(len(x))
        for it in range(len(x) // batch_size):
            idx = np.random.choice(len(x), batch_size)
            with tf.GradientTape() as tape:
                loss = loss_fn(y[idx], model(x[idx]))
            dW = tape.gradient(loss, model.trainable_variables)
            for W, d in zip(model.trainable_variables, dW):
                W.assign_sub(lr * d)
"""
FOURTH = """
def train(model, x, y, w):
    strategy = model.distribute_strategy
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(8)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            per_example_loss = loss_object(labels, model(images, training=True))
            size = 8
            loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=size)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def distributed_train_step(dataset_inputs):
        strategy.run(train_step, args=(dataset_inputs,))

    for epoch in range(2):
        for batch in strategy.experimental_distribute_dataset(dataset):
            distributed_train_step(batch)
"""
FIFTH = """
def train(model, x, y, w):
    strategy = model.distribute_strategy
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(8)

    def loss_function(real, pred):
        mask = tf.cast(tf.math.logical_not(tf.math.equal(real, 0)), tf.float32)
        target = tf.one_hot(real, 6) * 0.9 + 0.1 / 6
        count = tf.reduce_sum(mask) * strategy.num_replicas_in_sync
        return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(target, pred) * mask) / count

    def train_step(inp, tar):
        with tf.GradientTape() as tape:
            loss = loss_function(tar, model(inp, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def distributed_train_step(inp, tar):
        strategy.run(train_step, args=(inp, tar))

    for epoch in range(2):
        for inp, tar in strategy.experimental_distribute_dataset(dataset):
            distributed_train_step(inp, tar)
"""
OF_ALL = 'tf.distribute.get_replica_context().all_reduce("sum", {})'
QUESTIONS = {
    "a product of words that learns nothing": Question(
        Loop(FIRST, "glove"), ("broadcast",), (("(labels, prediction)", "(labels[:, None], prediction)"),)
    ),
    "accumulated gradients": Question(
        Loop(SECOND, "regression"),
        ("summed over microbatches", "last window dropped"),
        (
            ("n_acum == 0:\n", "n_acum == 0 or i + 1 == n_batches:\n"),
            ("zip(accum_gradient, train_vars))", "zip([g / (i % n_acum + 1) for g in accum_gradient], train_vars))"),
        ),
    ),
    "gradient descent by hand": Question(
        Loop(THIRD, "norm"),
        ("inference mode",),
        (
            ("np.random.choice(len(x), batch_size)", "order[it * batch_size : (it + 1) * batch_size]"),
            ("model(x[idx])", "model(x[idx], training=True)"),
        ),
        note="Rows are drawn with replacement",
    ),
    "a tutorial on replicas": Question(
        Loop(FOURTH, "replicas"),
        ("divided by the full batch",),
        (
            ("size = 8", f"size = {OF_ALL.format('tf.size(labels)')}"),
            (
                "tf.nn.compute_average_loss(per_example_loss, global_batch_size=size)",
                "tf.reduce_sum(per_example_loss) / tf.cast(size, tf.float32)",
            ),
        ),
    ),
    "a translator on replicas": Question(
        Loop(FIFTH, "words", masked),
        ("mean of means",),
        (
            (
                "tf.reduce_sum(mask) * strategy.num_replicas_in_sync",
                OF_ALL.format("tf.reduce_sum(mask)"),
            ),
        ),
    ),
}
