import numpy as np
import tensorflow as tf
import keras

rng = np.random.default_rng(0)


def get_data():
    x = rng.normal(size=(200, 8, 8, 3)).astype("float32")
    y = np.argmax(x.mean((1, 2)), 1)
    y = keras.utils.to_categorical(y, 10)
    return x[:160], y[:160], x[160:], y[160:]


def get_keras_model():
    inputs = keras.Input((8, 8, 3))
    h = keras.layers.Conv2D(4, 3)(inputs)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.Activation("relu")(h)
    h = keras.layers.Flatten()(h)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(h))


x_train, y_train, x_test, y_test = get_data()
model = get_keras_model()

loss_fn = tf.keras.losses.CategoricalCrossentropy()
lr = .1
batch_size = 16
epochs = 3
momentum = 0.9
prevs = [tf.zeros_like(W) for W in model.trainable_weights]

for epoch in range(epochs):
    for it in range(len(x_train) // batch_size):
        idx = np.random.choice(len(x_train), batch_size)  # a random batch
        with tf.GradientTape() as tape:
            y_pred = model(x_train[idx])
            loss = loss_fn(y_train[idx], y_pred)
        dWs = tape.gradient(loss, model.trainable_weights)
        for i, (W, dW) in enumerate(zip(model.trainable_weights, dWs)):
            v = momentum * prevs[i] - lr * dW
            W.assign(W + momentum * v - lr * dW)  # nesterov
            prevs[i] = v
        print(epoch, it, float(loss))
