"""docs/architecture.md lists every function that a batch crosses: a batch is walked, and compared
with the list.
"""

import re
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path

import keras
import pytest
from small import X, Y

import wholestep as ws
from wholestep.data.feed import Resident
from wholestep.engines.protocol import PARTS
from wholestep.plan import Planner

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
SIZE = 8
# On the way to a program, which is made once for each shape: no batch is computed there.
PROGRAM = "program.loop_updates", "update.ObjectiveUpdate.whole_update"
# asks for a gradient's shapes
SHAPES = {"update.ObjectiveUpdate._lookup_sizes", "engines.protocol.Programs.shapes"}
PLANNING = (
    "plan.",
    "context.",
    "model.coupling.",
    "executor.Executor._program",
    "data.feed.Loaded._planned",
)


def listed(*without):
    """Return the functions of the page's tables, without some parts of the way."""
    table = PAGE.split("## Every function that a batch crosses")[1].split("\n## Responsibilities")[
        0
    ]
    return [
        name
        for part, name in re.findall(r"^\| (\w+) \| `([\w.]+)` \|", table, flags=re.M)
        if part not in without
    ]


def running(parts):
    """Return the running functions of the library, outermost first: those of an engine by their
    protocol.
    """
    found = []
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname.split(".<locals>")[0]
        if module.startswith("wholestep."):
            owner, _, verb = name.partition(".")
            module = module.removeprefix("wholestep.")
            found.append(
                f"engines.protocol.{parts[owner]}.{verb}" if owner in parts else f"{module}.{name}"
            )
    return found[::-1]


@pytest.fixture(params=["a data set", "arrays"])
def walk(request, monkeypatch):
    """Return (stacks where a batch of a `fit` in microbatches is read, placed, sent and computed,
    its functions).
    """
    stacks = []
    parts = {}

    def note():
        stacks.append(running(parts))

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return len(X) // SIZE

        def __getitem__(self, i):
            note()
            return X[i * SIZE :][:SIZE], Y[i * SIZE :][:SIZE]

    class Squares(ws.Objective):
        def __call__(self, model, batch, training):
            note()
            return ws.Mean(keras.ops.mean((model(batch[0], training=training)) ** 2, axis=-1))

    def noting(function):
        def noted(*arguments, **options):
            note()
            return function(*arguments, **options)

        return noted

    program = Planner.program
    monkeypatch.setattr(
        Planner,
        "program",
        lambda *given: (lambda p: replace(p, call=noting(p.call)))(program(*given)),
    )
    monkeypatch.setattr(
        keras.optimizers.SGD, "update_step", noting(keras.optimizers.SGD.update_step)
    )
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
    trainer = ws.Trainer(model, Squares(), optimizer="sgd", microbatch_size=SIZE // 2)
    trainer.update((X[:SIZE], Y[:SIZE]))
    names = [field.name for field in fields(trainer.executor.engine)][: len(PARTS)]
    engine = trainer.executor.engine
    parts.update(
        {
            type(getattr(engine, name)).__name__: kind.__name__
            for name, kind in zip(names, PARTS, strict=True)
        }
    )
    devices = type(engine.devices)
    monkeypatch.setattr(devices, "stage", noting(devices.stage))
    # It would trace the update separately, and the loop over updates would reuse that trace.
    monkeypatch.setattr(type(engine.programs), "loops_slowly", lambda *_: False)
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
    trainer = ws.Trainer(model, Squares(), optimizer="sgd", microbatch_size=SIZE // 2)
    stacks.clear()
    monkeypatch.setattr(Resident, "_table", noting(Resident._table))
    if request.param == "arrays":
        trainer.fit(X, Y, batch_size=SIZE, verbose=0)
        return stacks, listed("read", "place")
    trainer.fit(Data(), verbose=0)
    return stacks, listed("rows")


@pytest.mark.own
def test_the_page_lists_every_function_that_a_batch_crosses(walk):
    (stacks, functions), crossed = walk, set()
    for stack in stacks:
        begins = [name for name in (*PROGRAM, "drive.drive") if name in stack]
        if begins[0] in PROGRAM or not any(name.startswith(PLANNING) for name in stack):
            crossed |= set(stack[stack.index(begins[0]) :])
    crossed -= SHAPES
    assert sorted(crossed) == sorted(functions)
    assert len(crossed) <= 16  # a new one takes the place of another
