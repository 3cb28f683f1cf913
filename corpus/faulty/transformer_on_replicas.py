"""A translator on replicas, in batches of about as many tokens

kind: faulty
engine: tensorflow
process: own
author: posted
changes: update
quantity: ROW_GRADIENTS
says: Each replica divides by its own tokens, and the means are averaged.
meant: def padded(rows):
        return keras.utils.pad_sequences(rows, 13, padding="post")
    
    sources, targets = (padded([np.append(pair[i], 1) for pair in pairs]) for i in (0, 1))
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    
    def masked(labels, logits):
        return padded_cross_entropy_loss(logits, labels, SMOOTHING, VOCAB_SIZE)
call: model, data=([sources, shifted], targets), loss=masked, optimizer=opt
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
VOCAB_SIZE, HIDDEN, SMOOTHING, EPOCHS = 12, 16, 0.1, 3
pairs = [(rng.integers(2, VOCAB_SIZE, n), rng.integers(2, VOCAB_SIZE, m)) for n, m in rng.integers(2, 13, (64, 2))]

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def generator():
    for source, target in pairs:
        yield np.append(source, 1), np.append(target, 1)  # 1 is <EOS>, 0 is padding


def make_dataset():
    signature = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(generator, output_signature=signature)
    dataset = dataset.shuffle(64)
    # batches of about as many tokens: short sentences in large batches, long ones in small batches
    return dataset.bucket_by_sequence_length(
        element_length_func=lambda source, target: tf.maximum(tf.shape(source)[0], tf.shape(target)[0]),
        bucket_boundaries=[9, 14],
        bucket_batch_sizes=[12, 8, 4],
        pad_to_bucket_boundary=True,
    )


def embedded(tokens):
    x = keras.layers.Embedding(VOCAB_SIZE, HIDDEN)(tokens)
    return keras.layers.LayerNormalization()(x)


def create_model():
    source, target = keras.Input((None,), dtype="int64"), keras.Input((None,), dtype="int64")
    encoded = embedded(source)
    encoded = encoded + keras.layers.MultiHeadAttention(2, 8)(encoded, encoded)
    encoded = encoded + keras.layers.Dense(HIDDEN, activation="relu")(keras.layers.LayerNormalization()(encoded))
    decoded = embedded(target)
    decoded = decoded + keras.layers.MultiHeadAttention(2, 8)(decoded, decoded, use_causal_mask=True)
    decoded = decoded + keras.layers.MultiHeadAttention(2, 8)(decoded, encoded)
    decoded = decoded + keras.layers.Dense(HIDDEN, activation="relu")(keras.layers.LayerNormalization()(decoded))
    logits = keras.layers.Dense(VOCAB_SIZE)(decoded)
    return keras.Model([source, target], logits)


def padded_cross_entropy_loss(logits, labels, smoothing, vocab_size):
    # Calculate smoothing cross entropy
    confidence = 1.0 - smoothing
    low_confidence = (1.0 - confidence) / tf.cast(vocab_size - 1, tf.float32)
    soft_targets = tf.one_hot(tf.cast(labels, tf.int32), depth=vocab_size, on_value=confidence, off_value=low_confidence)
    xentropy = tf.nn.softmax_cross_entropy_with_logits(logits=logits, labels=soft_targets)

    # Calculate the best (lowest) possible value of cross entropy, and subtract from the cross entropy loss.
    normalizing_constant = -(
        confidence * tf.math.log(confidence)
        + tf.cast(vocab_size - 1, tf.float32) * low_confidence * tf.math.log(low_confidence + 1e-20)
    )
    xentropy -= normalizing_constant

    weights = tf.cast(tf.not_equal(labels, 0), tf.float32)
    return xentropy * weights, weights


def transformer_loss(logits, labels, smoothing, vocab_size):
    xentropy, weights = padded_cross_entropy_loss(logits, labels, smoothing, vocab_size)
    return tf.reduce_sum(xentropy) / tf.reduce_sum(weights)


with strategy.scope():
    model = create_model()
    opt = keras.optimizers.Adam(learning_rate=0.001, beta_1=0.9, beta_2=0.997, epsilon=1e-9)
    opt.build(model.trainable_variables)

train_ds = strategy.experimental_distribute_dataset(make_dataset())


def _step_fn(inputs):
    """Per-replica step function."""
    inputs, targets = inputs
    with tf.GradientTape() as tape:
        shifted = tf.pad(targets, [[0, 0], [1, 0]])[:, :-1]
        logits = model([inputs, shifted], training=True)
        loss = transformer_loss(logits, targets, SMOOTHING, VOCAB_SIZE)
        # Scales the loss, which results in using the average loss across all of the replicas for backprop.
        scaled_loss = loss / strategy.num_replicas_in_sync  # fault

    tvars = model.trainable_variables
    grads = tape.gradient(scaled_loss, tvars)
    opt.apply_gradients(zip(grads, tvars))
    return loss


@tf.function(reduce_retracing=True)
def train_step(iterator_inputs):
    per_replica_losses = strategy.run(_step_fn, args=(iterator_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica_losses, axis=None)


# ---- training ----
for epoch in range(EPOCHS):
    total = 0.0
    for step, inputs in enumerate(train_ds):
        total += float(train_step(inputs))
    print("epoch", epoch + 1, "loss", total / (step + 1))
