"""The advantage is not cut from the gradient

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: LOSS_FORM
says: The advantage is not cut from the gradient: the policy loss also trains the value head.
call: model, data=(np.eye(STATES, dtype="float32"), [np.zeros(STATES, "int32"), np.zeros((STATES, 1), "float32")]),
    loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.MeanSquaredError()], optimizer=agent.opt
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import tensorflow as tf
import keras
from keras import layers

STATES, ACTIONS, GAMMA = 6, 2, 0.95


def policy_value_net():
    s = keras.Input((STATES,))
    h = layers.Dense(24, activation="tanh")(s)
    return keras.Model(s, [layers.Dense(ACTIONS, name="pi")(h), layers.Dense(1, name="v")(h)])


def rollout(model, rng, steps=16):
    s, xs, acts, rews = 0, [], [], []
    for _ in range(steps):
        x = np.eye(STATES, dtype="float32")[s]
        logits, _ = model(x[None], training=False)
        p = tf.nn.softmax(logits)[0].numpy()
        a = int(rng.random() < p[1])
        s = min(s + 1, STATES - 1) if a else max(s - 1, 0)
        r = 1.0 if s == STATES - 1 else 0.0
        if r:
            s = 0
        xs.append(x), acts.append(a), rews.append(r)
    ret, out = 0.0, []
    for r in reversed(rews):
        ret = r + GAMMA * ret
        out.append(ret)
    return np.array(xs), np.array(acts, "int32"), np.array(out[::-1], "float32")


class A2C:
    def __init__(self, model, lr=3e-3, entropy=0.01):
        self.model, self.entropy = model, entropy
        self.opt = keras.optimizers.Adam(lr)

    @tf.function
    def learn(self, x, a, ret):
        with tf.GradientTape() as tape:
            logits, v = self.model(x, training=True)
            v = tf.squeeze(v, -1)
            logp = tf.nn.log_softmax(logits)
            chosen = tf.gather(logp, a, axis=1, batch_dims=1)
            adv = ret - v  # fault
            actor = -tf.reduce_mean(chosen * adv)
            critic = tf.reduce_mean(tf.square(ret - v))
            ent = -tf.reduce_mean(tf.reduce_sum(tf.exp(logp) * logp, 1))
            loss = actor + 0.5 * critic - self.entropy * ent
        g = tape.gradient(loss, self.model.trainable_variables)
        g, _ = tf.clip_by_global_norm(g, 1.0)
        self.opt.apply_gradients(zip(g, self.model.trainable_variables))
        return loss

    def train(self, updates=15, seed=0):
        rng = np.random.default_rng(seed)
        for u in range(updates):
            x, a, ret = rollout(self.model, rng)
            loss = self.learn(tf.constant(x), tf.constant(a), tf.constant(ret))
            if u % 5 == 0:
                print(u, float(loss), ret.mean())


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = policy_value_net()
    agent = A2C(model)
    # ---- training ----
    agent.train()
