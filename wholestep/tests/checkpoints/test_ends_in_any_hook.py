"""A fault at every place: a fit that ends in any hook resumes to the same bits; a NaN in any batch
has one meaning.
"""

import re
import signal
from itertools import product

import keras
import numpy as np
import pytest
from exact import spread_over
from runs import BATCHES, SIZE, X, Y, check_same_bits, leaves, small
from shares import later

import wholestep as ws

HOW = {"batch_size": SIZE, "epochs": 3, "verbose": 0, "validation_data": (X[:9], Y[:9])}
NUM_HOOKS = 3 * (2 + 2 * BATCHES + 2 + 2 * 3) + 2
FAULTS = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "an error": RuntimeError("in a hook")}


class Interrupts(keras.callbacks.Callback):
    """Counts the calls of all hooks; raises an error or a signal in one hook."""

    def __init__(self, place=None, fault=None):
        super().__init__()
        self.num = 0
        self.place = place
        self.fault = fault
        for name in dir(keras.callbacks.Callback):
            if name.startswith(("on_train", "on_test", "on_epoch")):
                setattr(self, name, self.count)

    def count(self, *_, **__):
        self.num += 1
        if self.num - 1 == self.place:
            if isinstance(self.fault, Exception):
                raise self.fault
            signal.raise_signal(self.fault)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [23, *later([1])])
@pytest.mark.slow
def test_a_fit_that_ends_in_any_hook_resumes_to_the_same_bits(fault, every, tmp_path):
    whole = ws.Trainer(small())
    counts = Interrupts()
    history = whole.fit(X, Y, callbacks=[counts], **HOW).history
    assert counts.num == NUM_HOOKS
    resumed = ws.Trainer(small(seed=1))
    for place in range(5 * list(FAULTS).index(fault) % every, NUM_HOOKS, every):
        folder = ws.Checkpoints(tmp_path / str(place), every_steps=2, every_seconds=None)
        with pytest.raises((SystemExit, KeyboardInterrupt, RuntimeError)):
            ws.Trainer(small()).fit(
                X, Y, callbacks=[Interrupts(place, FAULTS[fault])], checkpoints=folder, **HOW
            )
        has_begun = any((tmp_path / str(place)).glob("step-*"))
        trainer = resumed if has_begun else ws.Trainer(small())
        assert trainer.fit(X, Y, checkpoints=folder, **HOW).history == history, place
        check_same_bits(leaves(whole.model), leaves(trainer.model))


# ---- NaN ----


class Reads(keras.callbacks.Callback):
    """Reads the logs of each batch."""

    def on_train_batch_end(self, batch, logs=None):
        assert "loss" in logs


def _fit(trainer, batches, **how):
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    return trainer.fit(x, y, batch_size=SIZE, shuffle=False, verbose=0, **how)


def _steps(trainer, batches):
    for _ in trainer.steps(
        ws.Batches(
            tuple(np.concatenate(part) for part in zip(*batches, strict=True)), SIZE, shuffle=False
        )
    ):
        pass


def _update(trainer, batches):
    for batch in batches:
        trainer.update(batch)["loss"]


PATHS = {
    "fit": _fit,
    "fit, with a callback": lambda trainer, batches: _fit(trainer, batches, callbacks=[Reads()]),
    "fit, on a generator": lambda trainer, batches: trainer.fit(
        (batch for batch in batches), verbose=0
    ),
    "steps": _steps,
    "update": _update,
}
MATRIX = list(product(PATHS, (None, 2), ("auto", 2), ("raise", "skip"), range(BATCHES)))


@pytest.mark.parametrize(
    ("path", "replicas", "microbatch_size", "policy", "bad"), [*MATRIX[::13], *later(MATRIX)]
)
def test_an_update_that_is_not_finite_is_the_same_nothing_everywhere(
    path, replicas, microbatch_size, policy, bad
):
    batches = [(X[i : i + SIZE].copy(), Y[i : i + SIZE]) for i in range(0, len(X), SIZE)]
    batches[bad][0][1, 2] = np.nan
    good = batches[:bad] + (batches[bad + 1 :] if policy == "skip" else [])
    plain = ws.Trainer(small())
    with spread_over(replicas):
        model = small()
    _update(plain, good)
    trainer = ws.Trainer(
        model, replicas=replicas, microbatch_size=microbatch_size, on_nonfinite=policy
    )
    if policy == "raise":
        with pytest.raises(ws.NonFiniteError, match=f"Update {bad + 1} ") as caught:
            PATHS[path](trainer, batches)
        row = 1 if path in ("fit, on a generator", "update") else bad * SIZE + 1
        assert re.search(rf"rows? {row}\b", str(caught.value)), str(caught.value)
    else:
        PATHS[path](trainer, batches)
        assert trainer.num_skipped == 1
    assert keras.ops.convert_to_numpy(model.optimizer.iterations) == len(good)
    for one, other in zip(plain.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)
