"""Small models of every kind that users bring: Keras' numbers, however the batch is cut, spread or
fed.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import keras
import numpy as np
import pytest
from zoo import BATCH, KINDS, ROWS, Kind

import wholestep as ws
from wholestep import engines, tree
from wholestep.context import UPDATE, Builder
from wholestep.model.draws import Draws, drawing

ENGINE = keras.backend.backend()
EVERY = 4 if ENGINE == "jax" else 12  # a strategy's programs take TensorFlow several times as long
HOW = {"epochs": 2, "shuffle": False, "verbose": 0}
CUT = 4
REPLICAS = 3
PIECES = 3  # a batch of 6 rows in 2 microbatches; 3 replicas, of 2 rows or of 1 and 1
LARGE = pytest.mark.large
NO_64_BITS = "ignore:[\\s\\S]*requested dtype float64"  # JAX has none unless asked, and says so
pytestmark = pytest.mark.filterwarnings(
    "ignore:microbatch_size", "ignore:Gradients do not exist", NO_64_BITS
)


class Stream:
    """Batches that nothing is known of before they come."""

    def __init__(self, parts: tuple):
        self.parts = parts

    def __iter__(self) -> Iterator[tuple]:
        for start in range(0, ROWS, BATCH):
            yield tree.map_leaves(lambda leaf, start=start: leaf[start : start + BATCH], self.parts)


def variables(model) -> list:
    states = [
        s
        for layer in model.layers
        if isinstance(layer, keras.layers.RNN)
        for s in layer.states or ()
    ]
    return [*model.variables, *model.optimizer.variables, *states]


def values(model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in variables(model)]


class Run:
    """One kind of model, trained by Keras and by us, each once."""

    def __init__(self, name: str, kind: Kind):
        self.name = name
        self.kind = kind
        self.data = (kind.x,) if kind.y is None else (kind.x, kind.y)
        self.model = kind.compiled()
        self.trainer = ws.Trainer(self.model)
        Builder(self.model, None).build(ws.Batches(self.data, BATCH).example, UPDATE)
        with engines.scope(self.model):
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
        self.start = values(self.model)

    def begin_again(self) -> None:
        for variable, value in zip(variables(self.model), self.start, strict=True):
            variable.assign(value)

    @cached_property
    def theirs(self) -> tuple[list, dict]:
        """The values and History of keras.Model; it uses our draws."""
        model = self.reference
        if self.kind.draws:
            self.arrays  # noqa: B018
            model.train_step = self.with_our_draws(model.train_step)
        history = model.fit(self.kind.x, self.kind.y, batch_size=BATCH, **HOW).history
        return values(model), history

    @cached_property
    def reference(self) -> keras.Model:
        return self.kind.compiled(**({"run_eagerly": True} if ENGINE == "tensorflow" else {}))

    def with_our_draws(self, train_step: Callable) -> Callable:
        """Return a step of Keras' own, of the draws of whole batches."""
        planner = self.trainer.executor.planner
        facts = next(iter(planner.programs.values())).forward.facts.draws
        assert facts

        def step(*given):
            with drawing(Draws(planner.engine, 0, BATCH, facts)):
                return train_step(*given)

        return step

    @cached_property
    def arrays(self) -> tuple[list, dict]:
        """What we train on arrays."""
        self.begin_again()
        return self.fit(self.trainer)

    def fit(self, trainer: ws.Trainer) -> tuple[list, dict]:
        history = trainer.fit(*self.data, batch_size=BATCH, **HOW).history
        return values(trainer.model), history

    def fit_stream(self, trainer: ws.Trainer) -> tuple[list, dict]:
        history = trainer.fit(Stream(self.data), epochs=2, verbose=0).history
        return values(trainer.model), history


@pytest.fixture(autouse=True)
def _fresh():
    """Names are fresh for each kind of model, not for each test of it: its tests share programs."""


@pytest.fixture(scope="module")
def run(request):
    return Run(request.param, KINDS[request.param])


def pytest_generate_tests(metafunc):
    """A difference that is known must be there: when it goes, so does its entry in the table."""
    check = metafunc.function.__name__.removeprefix("test_").replace("_", " ")
    params = [
        pytest.param(name, marks=marks_of(i, kind, check))
        for i, (name, kind) in enumerate(KINDS.items())
    ]
    metafunc.parametrize("run", params, indirect=True, scope="module")


def marks_of(number: int, kind: Kind, check: str) -> list:
    """What every kind is tried on: arrays or a stream, on one engine; the larger runs have all of
    all.
    """
    place = (number - (0 if ENGINE == "jax" else 2)) % 4
    on_arrays = place == 0
    is_tried = {
        "arrays": on_arrays,
        "own loop": on_arrays,
        "evaluation": on_arrays,
        "stream": place == 1,
        "evaluation of a stream": place == 1,
    }
    is_tried |= {
        "replicas": number % EVERY == 0,
        "replicas in microbatches": number % EVERY == EVERY // 2 + 1,
    }
    is_large = kind.large or not is_tried.get(check, True)
    known = [
        why for said, why in kind.differs.items() if said in (f"{ENGINE} {check}", f"* {check}")
    ]
    return [
        *([LARGE] if is_large else []),
        *(pytest.mark.xfail(strict=True, reason=why) for why in known),
    ]


def check_same(
    ours: tuple[list, dict], theirs: tuple[list, dict], run: Run, *, to_keras: bool = False
) -> None:
    for variable, one, two in zip(variables(run.model), ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(
            one, two, rtol=5 * run.kind.tol, atol=run.kind.tol, err_msg=variable.path
        )
    check_logs(ours[1], theirs[1], run.kind, to_keras=to_keras)


def check_logs(ours: dict, theirs: dict, kind: Kind, *, to_keras: bool) -> None:
    """Two runs tell the same numbers; Keras others, where that is known."""
    assert ours.keys() - theirs.keys() == set(kind.more if to_keras else ())
    for name, value in theirs.items():
        is_same = np.allclose(ours[name], value, rtol=5 * kind.tol, atol=kind.tol)
        assert is_same is not (to_keras and name in kind.unlike), (name, ours[name], value)


@pytest.mark.slow
def test_arrays(run):
    check_same(run.arrays, run.theirs, run, to_keras=True)


def test_own_loop(run):
    run.arrays  # noqa: B018
    run.begin_again()
    steps = list(run.trainer.steps(ws.Batches(run.data, BATCH, shuffle=False), epochs=2))
    assert len(steps) == 4
    for variable, one, two in zip(
        variables(run.model), values(run.model), run.arrays[0], strict=True
    ):
        np.testing.assert_array_equal(one, two, variable.path)


def test_evaluation(run):
    run.theirs  # noqa: B018
    for variable, value in zip(variables(run.model), run.theirs[0], strict=True):
        variable.assign(value)
    ours = run.trainer.evaluate(*run.data, batch_size=BATCH, verbose=0, return_dict=True)
    theirs = run.reference.evaluate(
        run.kind.x, run.kind.y, batch_size=BATCH, verbose=0, return_dict=True
    )
    check_logs(ours, theirs, run.kind, to_keras=True)
    ours = run.trainer.predict(run.kind.x, batch_size=BATCH, verbose=0)
    theirs = run.reference.predict(run.kind.x, batch_size=BATCH, verbose=0)
    tol = {"rtol": 5 * run.kind.tol, "atol": run.kind.tol}
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, **tol), ours, theirs)
    check_same((values(run.model), {}), (values(run.reference), {}), run)


def test_stream(run):
    run.begin_again()
    cut = "auto" if run.kind.couples else CUT
    found = run.fit_stream(ws.Trainer(run.model, microbatch_size=cut))
    check_same(found, run.theirs, run, to_keras=True)


def test_evaluation_of_a_stream(run):
    found = []
    for data, how in ((run.data, {"batch_size": BATCH}), ((Stream(run.data),), {})):
        run.begin_again()
        logs = run.trainer.evaluate(*data, verbose=0, return_dict=True, **how)
        found.append((logs, run.trainer.predict(data[0], verbose=0, **how), values(run.model)))
    check_logs(found[1][0], found[0][0], run.kind, to_keras=False)
    tol = {"rtol": 5 * run.kind.tol, "atol": run.kind.tol}
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, **tol), found[1][1:], found[0][1:]
    )


def test_replicas(run):
    check_has_replicas(run)
    check_same(run.fit(spread(run, "auto")), run.arrays, run)


@pytest.mark.slow
def test_replicas_in_microbatches(run):
    check_has_replicas(run)
    found = run.fit(spread(run, PIECES))
    if not run.kind.couples:
        check_same(found, run.arrays, run)


def check_has_replicas(run):
    """Leave out models that TensorFlow's replicas refuse, and hold that they do."""
    if ENGINE == "tensorflow" and run.name in (
        "compute loss on top",
        "compute loss instead",
        "add loss only",
    ):
        with pytest.raises(
            ws.SpecificationError,
            match=r"Under tf\.distribute every replica sees its own rows alone",
        ):
            run.fit(spread(run, "auto"))
        pytest.skip("what one replica finds does not add up")


def spread(run, size):
    """Return a trainer whose replicas share every batch; on JAX of the model that is there."""
    if ENGINE == "tensorflow":
        return ws.Trainer(
            run.kind.compiled(replicas=REPLICAS), replicas=REPLICAS, microbatch_size=size
        )
    run.begin_again()
    return ws.Trainer(run.model, replicas=REPLICAS, microbatch_size=size)
