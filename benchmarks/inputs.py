"""The kinds of data that people pass to `fit`, against the same in Keras: what it costs to bring a
batch to the model.

A kind whose package is not installed, or that no model on this engine takes, is left out.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import keras
import numpy as np
from keras import layers

import wholestep as ws
from benchmarks.language import same_start
from benchmarks.paths import Contest, Dataset, Run, in_turns

_SHARE = 0.05  # of the entries of sparse rows
_WORDS = 1000
_WORKERS = 4


class Kinds(Contest):
    """One model, twice, and the data of work P in every form; text has a model of its own."""

    def frame(self) -> tuple[Run, Run]:
        """A DataFrame, and a Series of labels."""
        import pandas as pd

        return self._fit(
            pd.DataFrame(self.data["x"]), pd.Series(self.data["y"]), batch_size=self.size
        )

    def sparse(self) -> tuple[Run, Run]:
        """A matrix of SciPy, of which few entries are not 0."""
        import scipy.sparse as sparse

        is_kept = np.random.default_rng(2).random(self.data["x"].shape) < _SHARE
        return self._fit(
            sparse.csr_matrix(self.data["x"] * is_kept), self.data["y"], batch_size=self.size
        )

    def workers(self) -> tuple[Run, Run]:
        """A PyDataset with workers."""
        return self._fit(Dataset(self.batches(), workers=_WORKERS))

    def processes(self) -> tuple[Run, Run]:
        """A PyDataset with workers that are processes."""
        return self._fit(Dataset(self.batches(), workers=_WORKERS, use_multiprocessing=True))

    def loader(self) -> tuple[Run, Run]:
        """A DataLoader that shuffles and batches."""
        import torch.utils.data as data
        from torch import from_numpy

        rows = data.TensorDataset(from_numpy(self.data["x"]), from_numpy(self.data["y"]))
        return self._fit(data.DataLoader(rows, batch_size=self.size, shuffle=True))

    def columns(self) -> tuple[Run, Run]:
        """A Hugging Face dataset by its columns, against Keras on the arrays that it holds."""
        import datasets

        table = datasets.Dataset.from_dict(
            {"row": self.data["x"], "label": self.data["y"]}
        ).with_format("numpy")
        options = {"batch_size": self.size, "verbose": 0}
        return lambda: self.trainer.fit(table, **options), lambda: self.model.fit(
            table[:]["row"], table[:]["label"], **options
        )

    def text(self) -> tuple[Run, Run]:
        """Strings into a model with TextVectorization."""
        import tensorflow as tf

        random = np.random.default_rng(3)
        num = len(self.data["y"])
        texts = tf.constant(
            [" ".join(f"w{n}" for n in row) for row in random.integers(0, _WORDS, (num, 8))]
        )
        self.trainer, self.model = ws.Trainer(_of_text()), _of_text()
        return self._fit(
            texts, random.normal(size=(num, 1)).astype("float32"), batch_size=self.size
        )


def _of_text() -> keras.Model:
    same_start()
    words = layers.TextVectorization(
        vocabulary=[f"w{n}" for n in range(_WORDS)], output_sequence_length=8
    )
    inputs = keras.Input((), dtype="string")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(_WORDS + 2, 16)(words(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    return model


# with the package that each needs
KINDS: dict[str, tuple[str, Callable[[Any], tuple[Run, Run]]]] = {
    "arrays": ("numpy", Kinds.arrays),
    "a DataFrame": ("pandas", Kinds.frame),
    "sparse rows": ("scipy", Kinds.sparse),
    "tf.data": ("tensorflow", Kinds.tf_data),
    "a generator": ("numpy", Kinds.generator),
    "a PyDataset": ("numpy", Kinds.dataset),
    f"a PyDataset, {_WORKERS} workers": ("numpy", Kinds.workers),
    f"a PyDataset, {_WORKERS} processes": ("numpy", Kinds.processes),
    "a DataLoader": ("torch", Kinds.loader),
    "Hugging Face columns": ("datasets", Kinds.columns),
    "text": ("tensorflow", Kinds.text),
}


def measure(rounds: int, quick: bool, only: str = "") -> dict[str, dict[str, list[float]]]:
    """Return for each kind the microseconds a batch takes, ours and in Keras, one for each round,
    in turns.
    """
    takes_text = keras.backend.backend() == "tensorflow"
    kinds = {
        name: kind
        for name, (package, kind) in KINDS.items()
        if only in name and find_spec(package) is not None and (takes_text or name != "text")
    }
    return in_turns(Kinds, kinds, rounds, quick)
