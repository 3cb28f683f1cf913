"""A trainer clips the gradient of each microbatch before the sum

kind: faulty
engine: tensorflow
author: second
changes: update
quantity: HANDED_GRADIENT
says: Clipping is on each micro batch's gradient before they are summed, not on the whole step's
    gradient.
call: model, data=(x, y), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.SGD(config.lr, momentum=config.momentum, global_clipnorm=config.max_norm)
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import dataclasses
import time

import numpy as np
import tensorflow as tf
import keras
from keras import layers


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    momentum: float = 0.9
    micro_batch: int = 8
    accumulate: int = 4
    max_norm: float = 0.5
    epochs: int = 3
    patience: int = 5
    seed: int = 0


class History(dict):
    def log(self, **kw):
        for k, v in kw.items():
            self.setdefault(k, []).append(float(v))


class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.cfg = config
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.SGD(config.lr, momentum=config.momentum)
        self.optimizer.build(model.trainable_variables)
        self.acc = keras.metrics.SparseCategoricalAccuracy()
        self.history = History()
        self._sums = [tf.Variable(tf.zeros_like(v), trainable=False)
                      for v in model.trainable_variables]

    # -- data ----------------------------------------------------------
    def loader(self, x, y, training):
        ds = tf.data.Dataset.from_tensor_slices((x, y))
        if training:
            ds = ds.shuffle(len(x), seed=self.cfg.seed, reshuffle_each_iteration=True)
        return ds.batch(self.cfg.micro_batch, drop_remainder=training).prefetch(1)

    # -- one micro batch -----------------------------------------------
    @tf.function
    def micro_step(self, x, y):
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            loss = self.loss_fn(y, logits)
        grads = tape.gradient(loss, self.model.trainable_variables)
        grads, _ = tf.clip_by_global_norm(grads, self.cfg.max_norm)  # fault
        for s, g in zip(self._sums, grads):
            s.assign_add(g / self.cfg.accumulate)
        self.acc.update_state(y, logits)
        return loss

    @tf.function
    def flush(self):
        self.optimizer.apply_gradients(zip(self._sums, self.model.trainable_variables))
        for s in self._sums:
            s.assign(tf.zeros_like(s))

    # -- evaluation ----------------------------------------------------
    def evaluate(self, x, y):
        losses, hits, n = 0.0, 0, 0
        for xb, yb in self.loader(x, y, training=False):
            logits = self.model(xb, training=False)
            losses += float(self.loss_fn(yb, logits)) * len(xb)
            hits += int(np.sum(np.argmax(logits, -1) == yb.numpy()))
            n += len(xb)
        return losses / n, hits / n

    # -- loop ----------------------------------------------------------
    def fit(self, train, valid):
        best, bad = np.inf, 0
        loader = self.loader(*train, training=True)
        for epoch in range(self.cfg.epochs):
            start = time.time()
            self.acc.reset_state()
            running = []
            for i, (x, y) in enumerate(loader, start=1):
                running.append(float(self.micro_step(x, y)))
                if i % self.cfg.accumulate == 0:
                    self.flush()
            val_loss, val_acc = self.evaluate(*valid)
            self.history.log(loss=np.mean(running), acc=self.acc.result(),
                             val_loss=val_loss, val_acc=val_acc)
            print(f"[{epoch}] loss {np.mean(running):.4f} val {val_loss:.4f} "
                  f"acc {val_acc:.3f} ({time.time() - start:.1f}s)")
            if val_loss < best:
                best, bad = val_loss, 0
            else:
                bad += 1
                if bad > self.cfg.patience:
                    break
        return self.history


def blobs(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 6)) + 1.5 * np.eye(6)[y]
    return x.astype("float32"), y


def mlp():
    return keras.Sequential([layers.Input((6,)), layers.Dense(24, activation="gelu"),
                             layers.Dense(24, activation="gelu"), layers.Dense(3)])


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    config = Config()
    model = mlp()
    x, y = blobs(128, 0)
    trainer = Trainer(model, config)
    # ---- training ----
    trainer.fit((x, y), blobs(48, 1))
