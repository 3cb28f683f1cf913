"""The record of a training of Keras that is compared with another."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import keras

from stepcheck.keras.hooks import Hooks, listening
from stepcheck.keras.listener import listener
from stepcheck.keras.state import room, untrained, values
from stepcheck.trace.log import Log, Values
from stepcheck.trace.measure import all_same, in_part
from stepcheck.trace.trace import Parameter, Run, Trace


@contextmanager
def recording(trace: Trace, models: list[keras.Model]) -> Iterator[None]:
    """Add the record of each model that is trained inside to a trace.

    Args:
        models: those that are recorded; none for all that are called by no other, and
            are trained.
    """
    own = listener()

    def found(model: keras.Model) -> Hooks:
        return Hooks(
            model, own, Log(room=room(model, is_run=True), is_run=True)
        )

    hooks = [found(model) for model in models]
    try:
        with listening(own, hooks, None if models else found):
            yield
    finally:
        engine = keras.backend.backend()
        trace.versions |= {
            "keras": keras.__version__,
            engine: import_module(engine).__version__,
        }
        trace.runs += [_run(each) for each in hooks if _is_trained(each, hooks)]


def _is_trained(own: Hooks, hooks: list[Hooks]) -> bool:
    """Whether a model was trained; one whose parts alone are called is left to their
    records.
    """
    variables = {id(v) for v in own.model.trainable_variables}
    called = [each for each in hooks if each.log.called]
    parts = {id(v) for each in called for v in each.model.trainable_variables}
    is_called = own in called or not variables <= parts
    passes = own.log.called
    is_moved = own.log.applied or any(
        p.differentiated is not False for p in passes
    )
    return bool(own.log.num_moves and is_called and is_moved)


def _run(hooks: Hooks) -> Run:
    model, log = hooks.model, hooks.log
    ended = values(model) or Values([], [])
    ended = Values(in_part(ended.params), in_part(ended.buffers))
    last = next((each.params_after for each in reversed(log.applied)), [])
    is_elsewhere = (
        log.is_stateless and last and not all_same(ended.params, last)
    )
    if log.is_cut or is_elsewhere:  # the loop went on, or is a stateless one
        ended = Values([], [])
    layers = model._flatten_layers()
    return Run(
        name=model.name,
        parameters=_described(model.trainable_variables),
        others=_described(untrained(model)),
        ended=ended,
        dtypes=tuple({layer.compute_dtype for layer in layers}),
        log=log,
    )


def _described(variables: list[keras.Variable]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(v.path, tuple(map(int, v.shape)), str(v.dtype))
        for v in variables
    )
