"""The layers are called one by one, the mask is lost on the way

kind: faulty
engine: tensorflow
author: first
changes: update
quantity: MODE
says: `tf.identity` on the embedding drops Keras' mask, so the LSTM runs over padding.
call: model, data=(tokens, y), loss="binary_crossentropy"
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(28)
tokens = rng.integers(1, 40, size=(260, 14)).astype("int32")
for r, n in enumerate(rng.integers(3, 14, size=260)):
    tokens[r, n:] = 0
y = (tokens[:, :1] > 20).astype("float32")
model = keras.Sequential([
    keras.Input((14,), dtype="int32"),
    keras.layers.Embedding(40, 12, mask_zero=True),
    keras.layers.LSTM(16),
    keras.layers.Dense(1, "sigmoid"),
])
emb, lstm, head = model.layers
bce = keras.losses.BinaryCrossentropy()
opt = keras.optimizers.Adam(1e-2)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        e = emb(xb)
        e = tf.identity(e)  # fault
        out = head(lstm(e, training=True))
        loss = bce(yb, out)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


ds = tf.data.Dataset.from_tensor_slices((tokens, y)).shuffle(260).batch(26)
# ---- training ----
for epoch in range(3):
    for xb, yb in ds:
        loss = train_step(xb, yb)
    print(epoch, float(loss))
