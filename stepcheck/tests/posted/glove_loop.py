import numpy as np
import tensorflow as tf
from keras import layers
import keras
from tensorflow import data

batch_size, epochs_number = 64, 5
rng = np.random.default_rng(0)
labels = [f"word{i}" for i in range(40)]
index_rows, index_cols = np.divmod(rng.permutation(1600)[:500], 40)
index_data = rng.integers(1, 300, 500).astype("float32")
pairs = np.stack([index_rows, index_cols], axis=1)


class GloveModel(tf.keras.Model):

    def __init__(self, vocab_size, dim=10, a=3 / 4, x_max=100):
        super(GloveModel, self).__init__()

        self.vocab_size = vocab_size
        self.dim = dim
        self.a = a
        self.x_max = x_max

        self.target_embedding = layers.Embedding(input_dim=self.vocab_size, output_dim=self.dim, name="target_embedding")
        self.target_bias = layers.Embedding(input_dim=self.vocab_size, output_dim=1, name="target_bias")

        self.context_embedding = layers.Embedding(input_dim=self.vocab_size, output_dim=self.dim, name="context_embedding")
        self.context_bias = layers.Embedding(input_dim=self.vocab_size, output_dim=1, name="context_bias")

        self.dot_product = layers.Dot(axes=-1, name="dot")

        self.prediction = layers.Add(name="add")
        self.step = 0

    def call(self, inputs):

        target_ix = inputs[:, 0]
        context_ix = inputs[:, 1]

        target_embedding = self.target_embedding(target_ix)
        target_bias = self.target_bias(target_ix)

        context_embedding = self.context_embedding(context_ix)
        context_bias = self.context_bias(context_ix)

        dot_product = self.dot_product([target_embedding, context_embedding])
        prediction = self.prediction([dot_product, target_bias, context_bias])

        return prediction

    def glove_loss(self, y_true, y_pred):

        weight = tf.math.minimum(tf.math.pow(y_true / self.x_max, self.a), 1.0)
        loss_value = tf.math.reduce_mean(weight * tf.math.pow(y_pred - tf.math.log(y_true), 2.0))

        return loss_value


train_ds = data.Dataset.from_tensor_slices(
    (np.hstack([index_rows.reshape(-1, 1), index_cols.reshape(-1, 1)]), index_data)
).shuffle(100000).batch(batch_size, drop_remainder=True)

optimizer = keras.optimizers.Adam()
glove_model = GloveModel(vocab_size=len(labels))
train_loss = keras.metrics.Mean(name='train_loss')


@tf.function
def train_step(examples, labels):
    with tf.GradientTape() as tape:
        predictions = glove_model(examples)
        loss = glove_model.glove_loss(labels, predictions)

    gradients = tape.gradient(loss, glove_model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, glove_model.trainable_variables))

    train_loss(loss)


total_step = 0
for epoch in range(epochs_number):

    pbar = train_ds.enumerate()

    for ix, (examples, labels) in pbar:

        train_step(examples, labels)

    print(f"Epoch {epoch + 1}, Loss {train_loss.result()}")

    # Reset the metrics for the next epoch
    train_loss.reset_state()
