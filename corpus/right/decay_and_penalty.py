"""AdamW with excluded biases, and the layers' own L2 in the loss of the head

kind: right
engine: tensorflow
author: first
says: The regulariser is added once, decay leaves biases out.
call: model, data=(x, y), loss=cce
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(22).normal(size=(300, 9)).astype("float32")
y = (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)
model = keras.Sequential([
    keras.Input((9,)),
    keras.layers.Dense(20, "relu"),
    keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(1e-2)),
])
optimizer = keras.optimizers.AdamW(2e-3, weight_decay=0.01)
optimizer.exclude_from_weight_decay(var_names=["bias"])
optimizer.build(model.trainable_variables)
cce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024).batch(30)


@tf.function
def train_on_batch(a, b):
    with tf.GradientTape() as t:
        logits = model(a, training=True)
        loss = cce(b, logits) + tf.add_n(model.losses)
    grads = t.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


# ---- training ----
for e in range(3):
    for a, b in data:
        l = train_on_batch(a, b)
    print(e, l.numpy())
