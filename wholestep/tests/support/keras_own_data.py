"""Data adapters, as Keras' own tests know them, whose batches are those that this library hands to
a model's step.

An adapter is made by Keras, with its checks. Its batches come from `Trainer(model).fit` on the same
data: the model's own `train_step` keeps what it was handed.
"""

import itertools
import types

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters

import wholestep as ws

ENDLESS = 12  # updates on data that do not end
CLASSES = {
    "array_data_adapter": "ArrayDataAdapter",
    "generator_data_adapter": "GeneratorDataAdapter",
    "grain_dataset_adapter": "GrainDatasetAdapter",
    "py_dataset_adapter": "PyDatasetAdapter",
    "tf_dataset_adapter": "TFDatasetAdapter",
    "torch_data_loader_adapter": "TorchDataLoaderAdapter",
}


class Keeps(keras.Model):
    """Keeps the batches that its updates are handed, by their numbers: a step that is only tried
    changes nothing.
    """

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.batches = types.SimpleNamespace(by_number={})  # nothing that Keras would track

    def train_step(self, *given):
        """Keep a batch. On JAX it comes after the state, which goes back; it has the count."""
        logs = {"loss": keras.ops.zeros(())}
        batch = given[-1]
        if len(given) == 2:
            params, (count,), *more = given[0]
            self.batches.by_number[int(count)] = batch
            return logs, (params, [count + 1], *more)
        if tf.executing_eagerly():
            self.batches.by_number[int(self.count)] = batch
        self.count.assign_add(1)
        return logs


def handed(data, options):
    """Yield the batches that a model's step is handed, then raise what ended `fit`."""
    model = Keeps()
    error = None
    model.compile(run_eagerly=True)
    try:
        ws.Trainer(model).fit(**data, verbose=0, **options)
    except Exception as raised:
        error = raised
    yield from model.batches.by_number.values()
    if error is not None:
        raise error


def adapted(cls):
    """Return an adapter whose batches come through this library."""

    class Adapted(cls):
        def __init__(self, *data, **options):  # as each test gives them
            first = next((options[name] for name in ("x", "dataset") if name in options), *data[:1])
            if cls.__name__ == "GeneratorDataAdapter":  # Keras draws from it too
                data, first = map(iter, itertools.tee(first))
                data = (data,)
            self._data = {"x": first} | {
                name: options[name] for name in ("y", "sample_weight") if name in options
            }
            said = {"shuffle": False} | options
            self._options = {
                name: said[name]
                for name in ("batch_size", "shuffle", "class_weight")
                if name in said
            }
            super().__init__(*data, **options)
            if cls.__name__ == "PyDatasetAdapter" and self.num_batches is None:
                self._options["steps_per_epoch"] = ENDLESS

        def get_numpy_iterator(self):
            return (
                keras.tree.map_structure(np.asarray, batch) for batch in self.get_jax_iterator()
            )

        def get_jax_iterator(self):
            return handed(self._data, self._options)

        get_tf_dataset = get_torch_dataloader = get_jax_iterator

    return Adapted


def adapters(name):
    """Return Keras' module of this name, with its adapter replaced."""
    module = getattr(data_adapters, name)
    cls = getattr(module, CLASSES[name])
    return types.SimpleNamespace(**{**vars(module), CLASSES[name]: adapted(cls)})
