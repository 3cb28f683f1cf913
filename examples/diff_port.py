"""A model of Keras, and its port to PyTorch: do they train alike? Run it with both, as
KERAS_BACKEND=jax.

Kernels of Keras have the shape (inputs, outputs), and weights of PyTorch (outputs, inputs): `match`
says so.
"""

import keras
import numpy as np
import torch
from torch import nn

import stepcheck

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
SIZE = 16
RATE = 0.05
LAYERS = {"first": "0", "last": "2"}
NAMES = {"kernel": "weight", "bias": "bias"}


def match(name):
    """Return the name in PyTorch of a parameter of Keras, and a view of its array in Keras'
    shape.
    """
    _, layer, own = name.split("/")
    return f"{LAYERS[layer]}.{NAMES[own]}", lambda value: value.T


def of_keras():
    """Return a model of Keras, and the trace of its training."""
    inner = [keras.layers.Dense(8, "tanh", name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((6,)), *inner])
    weights = [np.array(weight) for weight in model.get_weights()]
    model.compile(keras.optimizers.SGD(RATE), "mse")
    with stepcheck.record(model) as trace:
        model.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
    return weights, trace


def of_torch(weights, loss):
    """Return the trace of the port's training, begun with the same weights."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(weight.T))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with stepcheck.record(model) as trace:
        for x, y in zip(*(torch.tensor(part).split(SIZE) for part in (X, Y)), strict=True):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return trace


def main():
    """Return the comparisons of a right port and of a port with another loss."""
    weights, trace = of_keras()
    losses = nn.MSELoss(), nn.SmoothL1Loss()
    found = [stepcheck.diff(trace, of_torch(weights, loss), match=match) for loss in losses]
    print(f"The port:\n{found[0]}\n\nWith another loss:\n{found[1]}")
    print(
        "You have seen: a port is compared with its origin, parameter by parameter, by names and a "
        "view."
    )
    return found


if __name__ == "__main__":
    main()
