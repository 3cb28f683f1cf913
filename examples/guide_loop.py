"""Does the training loop of a Keras guide for JAX train as `fit` does? Check it.

The loop has the habits of the one in Keras' guide "Multi-GPU distributed training with JAX", on one
device (https://keras.io/guides/distributed_training_with_jax). It calls the model without
`training`, takes the rows unshuffled, drops the last, shorter batch, and prints the last batch's
loss as the epoch's. The guide trains on MNIST: 60 000 images, 64 to a batch, so 32 are never used.
Here the data are scikit-learn's digits: 1248 images, of which 32 are never used, and 549 others to
test on.

1. the loop as written, watched for two epochs: three causes, with the lines to change;
2. the same loop with these changes: nothing found;
3. both loops and `fit`, trained for 30 epochs: how many of the other images they classify
correctly.

    KERAS_BACKEND=jax python examples/guide_loop.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import stepcheck

BATCH_SIZE = 64
NUM_TRAINED = 1248
NUM_EPOCHS = 30


def main():
    """Watch the loop as written and with the changes, and train by each; return the reports and the
    accuracies.
    """
    if keras.backend.backend() != "jax":
        raise SystemExit("This loop calls JAX. Run it with KERAS_BACKEND=jax.")
    train, test = digits()
    loops = {"as written": as_written, "with the changes": mended}
    reports = [watched(name, loop, train) for name, loop in loops.items()]
    accuracies = {
        name: accuracy(loop, train, test) for name, loop in {**loops, "fit": by_fit}.items()
    }
    for name, share in accuracies.items():
        print(
            f"{NUM_EPOCHS} epochs, {name}: {share:.0%} of {len(test[0])} other images are "
            "classified correctly"
        )
    print(
        "You have seen: stepcheck named the habits of a guide's loop that make it worse than `fit`."
    )
    return reports, accuracies


def watched(name, loop, train):
    """Train a new model for two epochs, watch it, and print the report."""
    model = network()
    with stepcheck.watch(model, data=train, rows="once") as report:
        printed = loop(model, *train, num_epochs=2)
    report.printed(loss=printed)
    print(
        f"---- the loop {name} ----\nIt prints the losses "
        f"{np.round(printed, 3).tolist()}.\n{report}\n"
    )
    return report


def accuracy(loop, train, test):
    """Return the share of the test images that a model classifies correctly after training."""
    model = network()
    loop(model, *train, num_epochs=NUM_EPOCHS)
    return float(np.mean(model.predict(test[0], verbose=0).argmax(axis=1) == test[1]))


def by_fit(model, x, y, num_epochs):
    model.fit(x, y, BATCH_SIZE, num_epochs, verbose=0)


# ---- the loop of the guide ----


def as_written(model, x, y, num_epochs):
    """Train on batches in the order of the data; return the losses that the loop prints."""
    step = step_of(model)
    state = begin(model)
    printed = []
    for _ in range(num_epochs):
        for start in range(0, len(x) - BATCH_SIZE + 1, BATCH_SIZE):  # drop_remainder=True
            loss, state = step(state, x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE])
        printed.append(float(loss))
    end(model, state)
    return printed


def mended(model, x, y, num_epochs):
    """Train on all rows in a new order each epoch, with dropout; return the mean loss of each
    epoch.
    """
    step = step_of(model, training=True)
    state = begin(model)
    printed = []
    for epoch in range(num_epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        total = 0.0
        for start in range(0, len(x), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            loss, state = step(state, x[rows], y[rows])
            total += float(loss) * len(rows)
        printed.append(total / len(x))
    end(model, state)
    return printed


def step_of(model, **mode):
    """Return the compiled update; the guide calls the model without `training`."""

    def loss_of(trainable, others, x, y):
        predicted, others = model.stateless_call(trainable, others, x, **mode)
        return model.loss(y, predicted), others

    @jax.jit
    def step(state, x, y):
        trainable, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, others, x, y
        )
        trainable, slots = model.optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, others, slots)

    return step


def begin(model):
    """Return the values to train: of the model's variables and of its optimizer's."""
    model.optimizer.build(model.trainable_variables)
    kinds = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    return tuple([variable.value for variable in kind] for kind in kinds)


def end(model, state):
    """Assign the trained values to the model's variables."""
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    for variable, value in zip(model.non_trainable_variables, state[1], strict=True):
        variable.assign(value)


# ---- the model and the images ----


def network():
    """Return a compiled convolutional network with BatchNormalization and dropout, smaller than the
    guide's.
    """
    seeded = [keras.initializers.GlorotUniform(seed) for seed in range(4)]
    image = keras.Input((8, 8, 1))
    h = layers.Rescaling(1 / 16)(image)
    for num_filters in (12, 24):
        how = {"strides": num_filters // 12, "padding": "same", "use_bias": False}
        h = layers.Conv2D(num_filters, 3, kernel_initializer=seeded.pop(), **how)(h)
        h = layers.ReLU()(layers.BatchNormalization(scale=False)(h))
    h = layers.Dense(64, "relu", kernel_initializer=seeded.pop())(
        layers.GlobalAveragePooling2D()(h)
    )
    h = layers.Dense(10, kernel_initializer=seeded.pop())(layers.Dropout(0.5, seed=4)(h))
    model = keras.Model(image, h)
    model.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def digits():
    """Return (images, classes) to train on and to test on."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32")
    return (x[:NUM_TRAINED], y[:NUM_TRAINED]), (x[NUM_TRAINED:], y[NUM_TRAINED:])


if __name__ == "__main__":
    main()
