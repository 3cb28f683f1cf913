import keras
import numpy as np
import tensorflow as tf


def make_data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(150, 12)).astype("float32")
    y = np.argmax(x[:, :4] + 0.5 * rng.normal(size=(150, 4)), axis=1).astype("int32")
    return x[:110], y[:110], x[110:], y[110:]


def build():
    return keras.Sequential([
        keras.Input((12,)),
        keras.layers.Dense(32, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("relu"),
        keras.layers.Dropout(0.2, seed=11),
        keras.layers.Dense(4),
    ])


@tf.function(reduce_retracing=True)
def train_step(model, optimizer, xb, yb):
    with tf.GradientTape() as tape:
        logits = model(xb, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=yb, logits=logits))
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    return loss


def accuracy(model, x, y):
    return float(np.mean(np.argmax(model(x, training=False), axis=1) == y))


def main():
    keras.utils.set_random_seed(21)
    x, y, xv, yv = make_data()
    model = build()
    optimizer = keras.optimizers.Adam(learning_rate=3e-3)
    optimizer.build(model.trainable_variables)
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    for epoch in range(4):
        losses = [float(train_step(model, optimizer, xb, yb)) for xb, yb in train]
        print(f"epoch {epoch} loss {np.mean(losses):.5f} val_accuracy {accuracy(model, xv, yv):.3f}")
    return model


if __name__ == "__main__":
    main()
