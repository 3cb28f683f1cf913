"""Random words on TensorFlow: its Philox kernel counts up from the place of the first row."""

import tensorflow as tf

from wholestep.tree import Tensor

_PHILOX = 1


class TensorflowRandom:
    """The part `random` of the engine on TensorFlow."""

    shuffles_slices = True  # `keras.random.shuffle` moves whole slices: all rows in one order

    def words(self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int) -> Tensor:
        """Return the words of each row by its place: (rows, words), by Philox-4x32-10, see `jax_random`."""
        num = -(-num_words // 4)
        one, two = tf.unstack(tf.bitwise.bitwise_and(tf.cast(seed, tf.int64), 0xFFFFFFFF))
        key = tf.bitwise.bitwise_or(one, tf.bitwise.left_shift(two, tf.constant(32, tf.int64)))
        counter = tf.stack([tf.cast(first, tf.int64) * num, tf.cast(stream, tf.int64)])
        drawn = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[num_rows * num * 4],
            key=tf.bitcast(key[None], tf.uint64),
            counter=tf.bitcast(counter, tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        # No transposition: oneDNN logs that it cannot transpose integers.
        blocks = tf.unstack(tf.reshape(drawn, (num_rows, num, 4)), axis=2)
        return tf.concat(blocks, axis=1)[:, :num_words]

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivative of a gamma sample by its parameter."""
        return tf.raw_ops.RandomGammaGrad(alpha=alpha, sample=sample)
