"""Programs on TensorFlow: the choice of XLA, and their fast call."""

from functools import partial

import keras
import tensorflow as tf

from wholestep.tree import Tree

# XLA's convolutions on CPU are many times slower than TensorFlow's (measured: 20x); sizes that depend on values fail in
# the middle of a run; operations in Python cannot be judged by the graph. All others are compiled on trial.
_NOT_FOR_XLA = ("Conv", "Depthwise", "Unique", "Where", "PyFunc", "EagerPyFunc")


def choose_xla(model: keras.Model | None, asked: bool | str) -> tuple[bool, str]:
    """Return (whether every program must be compiled by XLA, why none may be); (False, "") to try each program."""
    if model is not None and not all(layer.supports_jit for layer in model._flatten_layers()):
        return False, "a layer does not support XLA (supports_jit=False)"
    if model is not None and asked == "auto" and getattr(model, "compiled", False):
        if model.jit_compile:
            return True, ""
        # Keras resolves "auto" in `compile` already: without a GPU to False, which is then not the user's choice.
        asked = "auto" if not model._resolve_auto_jit_compile() else False
    return asked is True, "" if asked else "jit_compile=False"


def is_not_for_xla(program: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a traced function holds an operation for which XLA is known to be slow or to fail."""
    definition = program.graph.as_graph_def()
    functions = [node for function in definition.library.function for node in function.node_def]
    return any(node.op.startswith(_NOT_FOR_XLA) for node in [*definition.node, *functions])


def holds_unknown_lists(program: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a traced function makes lists whose length a loop pops off another list.

    The gradient of a loop by what it reads does so, as in a second recurrent layer. XLA cannot compile it, and says so
    in hundreds of lines of TensorFlow's log.
    """
    for function in program.graph.as_graph_def().library.function:
        kinds = {node.name: node.op for node in function.node_def}
        reserves = (node for node in function.node_def if node.op == "TensorListReserve")
        if any(kinds.get(node.input[1].partition(":")[0]) == "TensorListPopBack" for node in reserves):
            return True
    return False


class FlatCall:
    """A traced function that is called with its flat tensors.

    TensorFlow's handling of nested arguments takes as long as a small update at every call.

    >>> function = tf.function(lambda pair: {"sum": pair[0] + pair[1]})
    >>> traced = function.get_concrete_function((tf.TensorSpec(()), tf.TensorSpec(())))
    >>> float(FlatCall(traced)((tf.constant(1.0), tf.constant(2.0)))["sum"])
    3.0
    """

    def __init__(self, traced: tf.types.experimental.ConcreteFunction):
        self.traced = traced
        self._function = traced.inference_fn
        self._captured = traced.captured_inputs
        given = tf.nest.flatten(traced.structured_input_signature)
        self._has_ragged = any(isinstance(spec, tf.RaggedTensorSpec) for spec in given)
        results = traced.structured_outputs
        # Keras packs trees 20 times as fast; it can be used only if it orders the leaves alike.
        is_same = all(
            one is two for one, two in zip(keras.tree.flatten(results), tf.nest.flatten(results), strict=True)
        )
        self._pack = partial((keras.tree if is_same else tf.nest).pack_sequence_as, results)

    def __call__(self, *arguments: Tree) -> Tree:
        """Return the function's results, in their nesting."""
        flat = tf.nest.flatten(arguments, expand_composites=self._has_ragged)
        tensors = [tensor for tensor in flat if tensor is not None]
        return self._pack(self._function.call_flat(*tensors, *self._captured))
