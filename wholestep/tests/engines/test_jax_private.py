"""Without a name of JAX' private side, a run is slower or refused, and never wrong."""

import keras
import numpy as np
import pytest

import wholestep as ws

if keras.backend.backend() != "jax":
    pytest.skip("of the JAX engine", allow_module_level=True)

import jax
from jax._src import distributed, xla_bridge
from jax.interpreters import mlir

from wholestep import jax_private
from wholestep.engines import jax_cpu


def test_without_the_rules_of_operations_xla_has_them(monkeypatch):
    monkeypatch.delattr(mlir, "_lowerings")
    monkeypatch.delattr(mlir, "_platform_specific_lowerings")
    registered = []
    monkeypatch.setattr(mlir, "register_lowering", lambda *given, **how: registered.append(given))
    jax_cpu.register()
    assert registered == []


def test_without_a_trace_draws_are_refused(monkeypatch):
    def draw(x):
        monkeypatch.setattr(jax_private, "getattr", lambda *given: None, raising=False)
        with pytest.raises(ws.SpecificationError, match="_trace, for random draws"):
            jax_private.current_trace()
        return x

    jax.jit(draw)(np.ones(2))


def test_without_the_store_several_processes_are_refused(monkeypatch):
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(ws.SpecificationError, match="global_state, for several processes"):
        jax_private.store_client()


def test_without_the_state_of_jax_the_switch_of_results_that_repeat_is_refused(monkeypatch):
    monkeypatch.delattr(xla_bridge, "backends_are_initialized")
    with pytest.raises(ws.SpecificationError, match=r"for wholestep.deterministic\(\)"):
        jax_private.has_backends()
