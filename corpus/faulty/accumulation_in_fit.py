"""Accumulated gradients in fit, by a train_step

kind: faulty
engine: tensorflow
author: posted
changes: update
quantity: ROWS
also: ROW_GRADIENTS
says: The sum of three gradients is applied, and a window is carried over the end of an epoch.
call: custom_model, data=(x_train, y_train), rows="once"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

BATCH, ACCUM = 8, 3
rng = np.random.default_rng(0)
x_train = rng.normal(size=(100, 12)).astype("float32")
y_train = (x_train.sum(1) > 0).astype("float32")[:, None]


class CustomTrainStep(keras.Model):
    def __init__(self, n_gradients, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_gradients = tf.constant(n_gradients, dtype=tf.int32)
        self.n_acum_step = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.gradient_accumulation = [
            tf.Variable(tf.zeros_like(v, dtype=tf.float32), trainable=False) for v in self.trainable_variables
        ]

    def train_step(self, data):
        self.n_acum_step.assign_add(1)

        x, y = data
        # Gradient Tape
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        # Calculate batch gradients
        gradients = tape.gradient(loss, self.trainable_variables)
        # Accumulate batch gradients
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign_add(gradients[i])  # fault

        # If n_acum_step reach the n_gradients then we apply accumulated gradients to update the variables
        tf.cond(tf.equal(self.n_acum_step, self.n_gradients), self.apply_accu_gradients, lambda: None)  # fault

        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def apply_accu_gradients(self):
        # apply accumulated gradients
        self.optimizer.apply_gradients(zip(self.gradient_accumulation, self.trainable_variables))

        # reset
        self.n_acum_step.assign(0)
        for i in range(len(self.gradient_accumulation)):
            self.gradient_accumulation[i].assign(tf.zeros_like(self.trainable_variables[i], dtype=tf.float32))


inputs = keras.Input((12,))
base = keras.layers.Dense(8, activation="relu")(inputs)
out = keras.layers.Dense(1, activation="sigmoid")(base)
custom_model = CustomTrainStep(n_gradients=ACCUM, inputs=[inputs], outputs=[out])
custom_model.compile(loss="binary_crossentropy", metrics=["accuracy"], optimizer=keras.optimizers.Adam(learning_rate=0.001))
checkpoint = keras.callbacks.EarlyStopping(monitor="loss", patience=3)
# ---- training ----
custom_model.fit(x_train, y_train, batch_size=BATCH, epochs=4, verbose=2, callbacks=[checkpoint])
