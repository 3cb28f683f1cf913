"""A deleted trainer is freed at once, with its arrays on the device: it is in no cycle."""

import gc
import weakref

import pytest
from small import X, Y, model

import wholestep as ws

CALLS = {
    "update": lambda trainer: trainer.update((X, Y))["loss"],
    "unread update": lambda trainer: trainer.update((X, Y)) and None,
    "test_on_batch": lambda trainer: trainer.test_on_batch(X, Y),
    "train_on_batch": lambda trainer: trainer.train_on_batch(X, Y),
    "fit": lambda trainer: trainer.fit(X, Y, verbose=0),
    "fit a stream": lambda trainer: trainer.fit(iter([(X, Y)]), verbose=0),
    "validation": lambda trainer: trainer.fit(X, Y, validation_data=(X, Y), verbose=0),
    "evaluate": lambda trainer: trainer.evaluate(X, Y, verbose=0),
    "predict": lambda trainer: trainer.predict(X, verbose=0),
    "steps": lambda trainer: [step.loss for step in trainer.steps((X, Y))],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_deleted_trainer_is_freed_without_the_collector_of_cycles(name):
    trainer = ws.Trainer(model())
    gc.disable()
    try:
        CALLS[name](trainer)
        executor = trainer.executor
        parts = [
            trainer,
            trainer.run,
            executor,
            executor.planner,
            executor.evaluation,
            executor.context,
        ]
        alive = [weakref.ref(part) for part in parts]
        del trainer, executor, parts
        assert [type(part()).__name__ for part in alive if part() is not None] == []
    finally:
        gc.enable()
