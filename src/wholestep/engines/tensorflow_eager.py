"""The engine on TensorFlow where nothing is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from wholestep.engines.eager import Eager
from wholestep.engines.tensorflow import TensorflowEngine
from wholestep.state import Variables


class EagerTensorflowEngine(Eager, TensorflowEngine):
    """The methods of `wholestep.engines.protocol` on TensorFlow, for one device, without `tf.function`."""

    @contextmanager
    def trying(self, variables: Variables) -> Iterator[None]:
        """Return a context that restores these variables, after a step is called only for its results' shapes."""
        held = [*variables.params, *variables.slots, *variables.buffers, *variables.metrics]
        before = [tf.identity(v.value) for v in held]
        try:
            yield
        finally:
            for variable, value in zip(held, before, strict=True):
                variable.value.assign(value, read_value=False)
