"""EMA of the weights by hand, used for evaluation and swapped back

kind: right
engine: tensorflow
author: first
says: The averaged weights are only lent to the evaluation.
call: model, data=(x_train, y_train), loss="mse"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x_train = np.random.RandomState(0).randn(300, 6).astype("float32")
y_train = np.sin(x_train[:, :1]) + 0.1 * x_train[:, 1:2]
x_val, y_val = x_train[:50], y_train[:50]

model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(24, "tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(3e-3)
mse = keras.losses.MeanSquaredError()


class EMA:
    def __init__(self, model, decay=0.95):
        self.model, self.decay = model, decay
        self.shadow = [w.copy() for w in model.get_weights()]

    def update(self):
        for s, w in zip(self.shadow, self.model.get_weights()):
            s *= self.decay
            s += (1 - self.decay) * w

    def evaluate(self, xv, yv):
        backup = self.model.get_weights()
        self.model.set_weights(self.shadow)
        result = float(mse(yv, self.model(xv, training=False)))
        self.model.set_weights(backup)
        return result


ema = EMA(model)
# ---- training ----
for epoch in range(4):
    order = np.random.permutation(len(x_train))
    for start in range(0, len(order), 30):
        idx = order[start:start + 30]
        with tf.GradientTape() as tape:
            pred = model(x_train[idx], training=True)
            loss = mse(y_train[idx], pred)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        ema.update()
    print(epoch, float(loss), ema.evaluate(x_val, y_val))
