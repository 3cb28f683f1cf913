"""A probe: right updates pass each change, wrong ones move by the change that they are wrong in."""

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
import pytest
from scripts import imported

import stepcheck
from stepcheck.errors import SpecificationError
from stepcheck.report.probed import Cause, Outcome, Variation

DRAW = np.random.default_rng(0)
NUM = np.array([4, 2, 3, 1, 4, 2])
MASK = np.arange(4) < NUM[:, None]
X = DRAW.normal(size=(6, 4, 3)).astype("float32")
BATCH = {
    "x": X,
    "y": DRAW.normal(size=(6, 4)).astype("float32"),
    "mask": MASK.astype("float32"),
    "sizes": np.array([1, 2, 0, 1, 3, 1], "float32"),
}
PAGE = (Path(__file__).parents[1] / "docs" / "probe.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def linear(batch, microbatches=1, fault=""):
    """Return the weights after a step on weighted squares: right in each respect, but for a fault."""
    batch = {name: np.asarray(value) for name, value in batch.items()}
    start = np.array([0.3, -0.2, 0.1], "float32")
    counts = batch["mask"] * batch["sizes"][:, None]
    gradient = np.zeros(3, "float32")
    for rows in np.array_split(np.arange(len(counts)), microbatches):
        x, y, w = batch["x"][rows], batch["y"][rows], counts[rows]
        error = x @ start - y
        if fault == "padding":
            error = error - error.mean()
        if fault == "weights":
            error = (
                error
                - (error * batch["mask"][rows]).sum()
                / batch["mask"][rows].sum()
            )
        if fault == "order":
            w = w * np.arange(1, len(w) + 1)[:, None]
        part = np.einsum("nl,nl,nld->d", w, error, x)
        divisor = w.sum() * microbatches if fault == "means" else counts.sum()
        if fault == "rows":
            divisor = len(counts)
        gradient += (part / divisor).astype("float32")
    return {
        "w": start - np.float32(0.5) * gradient,
        "frozen": np.ones(2, "float32"),
    }


def probed(fault="", batch=BATCH, **changed):
    stated = {
        "padding": ~MASK,
        "weights": BATCH["sizes"],
        "cuts": (1, 2, 3),
    } | changed
    return stepcheck.probe(
        lambda batch, num=1: linear(batch, num, fault), batch, **stated
    )


def moved(report):
    return {each.change for each in report.findings}


def test_a_right_update_passes_each_change():
    report = probed()
    report.require()
    report.require("order", "padding", "weights", "cuts")
    assert report.is_right
    assert {each.change for each in report.effects} == {*Variation}
    assert (
        report.first_line
        == "4 changes of the batch that must not matter: none moves the weights."
    )


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("padding", {Variation.PADDING, Variation.WEIGHTS, Variation.CUTS}),
        ("weights", {Variation.WEIGHTS, Variation.CUTS}),
        ("order", {Variation.ORDER, Variation.CUTS}),
        ("means", {Variation.CUTS}),
    ],
)
def test_a_wrong_update_moves_by_its_change(fault, changes):
    report = probed(fault)
    assert moved(report) == changes, report
    assert not report.is_right
    assert all(
        name == "w" for each in report.findings for name, _ in each.parameters
    )
    for change in changes:
        with pytest.raises(AssertionError, match="The update depends on"):
            report.require(change)


def test_weights_of_places():
    batch = BATCH | {"sizes": np.ones(6, "float32")}
    assert probed(batch=batch, padding=None, weights=batch["mask"]).is_right
    assert moved(
        probed("padding", batch, padding=None, weights=batch["mask"], cuts=None)
    ) == {Variation.WEIGHTS}


def test_an_update_that_goes_on_is_not_judged():
    state = [np.zeros(3)]

    def update(batch):
        state[0] = state[0] + linear(batch)["w"]
        return state

    report = stepcheck.probe(update, BATCH)
    assert (report.cause, report.is_right, report.effects) == (
        Cause.DRAWS,
        False,
        (),
    )
    with pytest.raises(AssertionError, match="Restore the weights"):
        report.require()


def test_an_update_that_draws_is_not_judged():
    draw = np.random.default_rng(0)
    report = stepcheck.probe(
        lambda batch: linear(batch)["w"] + draw.normal(size=3), BATCH
    )
    assert report.cause is Cause.DRAWS
    assert "two calls" in str(report)


def test_an_update_that_sees_nothing_is_not_judged():
    """The check of the check."""
    assert stepcheck.probe(lambda _: np.ones(3), BATCH).cause is Cause.UNSEEN
    with pytest.raises(AssertionError, match="no other value"):
        stepcheck.probe(lambda _: np.ones(3), BATCH).require()
    report = stepcheck.probe(
        lambda batch: np.float32(1e9) + linear(batch)["w"], BATCH
    )
    assert (
        report.cause is Cause.UNSEEN
    )  # smaller than the rounding of the weights


def test_weights_that_are_not_finite():
    assert (
        stepcheck.probe(lambda _: np.full(3, np.nan), BATCH).cause
        is Cause.NOT_FINITE
    )
    leaks = stepcheck.probe(
        lambda batch: np.log(batch - 2.0).sum(axis=0),
        np.arange(2.0, 10).reshape(4, 2) + 0.5,
    )
    assert leaks.cause is None


def test_noise_of_equal_calls_is_rounding():
    draw = np.random.default_rng(0)

    def update(batch):
        return linear(batch)["w"] + draw.normal(size=3) * 1e-3

    report = stepcheck.probe(update, BATCH)
    assert (report.is_right, report.rounding > 1e-3) == (True, True), report


def test_an_optimizer_that_divides_by_a_gradient_of_zero_is_not_accused():
    def update(batch):
        x = batch["x"][:, 0]
        rounding = sum(x) - x.astype("float64").sum(axis=0)
        return {
            "w": linear(batch)["w"],
            "v": np.ones(5),
            "bias": np.sign(rounding),
        }

    order = stepcheck.probe(update, BATCH).effects[-1]
    assert (order.change, order.cause) == (Variation.ORDER, Cause.SMALL)
    assert "bias" in str(order)
    assert "w (" not in str(order)


def test_a_change_that_the_update_refuses():
    def update(batch):
        if np.any(np.diff(batch["x"][:, 0, 0]) < 0):
            raise ValueError("rows must be sorted")
        return linear(batch)

    batch = {
        name: value[np.argsort(X[:, 0, 0])] for name, value in BATCH.items()
    }
    report = stepcheck.probe(update, batch)
    order = report.unjudged[-1]
    assert (order.change, order.cause) == (Variation.ORDER, Cause.REFUSED)
    assert "rows must be sorted" in str(order)
    with pytest.raises(AssertionError):
        report.require("order")


IDS = np.where(MASK, np.arange(24).reshape(6, 4) % 7 + 1, 0)
TABLE = np.linspace(0, 1, 16).reshape(8, 2)


def known_by_zeros(batch):
    real = batch["ids"] != 0
    return (TABLE[batch["ids"]] * real[..., None]).sum(axis=(0, 1)) / real.sum()


def test_values_that_mark_the_padding_are_only_judged_where_they_are_named():
    report = stepcheck.probe(known_by_zeros, {"ids": IDS}, padding=IDS == 0)
    (ids,) = report.unjudged
    assert (ids.cause, report.findings, report.is_right) == (
        Cause.MARKS,
        (),
        False,
    )
    assert "all have one value, which no real place has" in str(ids)
    assert "padding={'ids': mask}" in str(ids)
    named = stepcheck.probe(
        known_by_zeros, {"ids": IDS}, padding={"ids": IDS == 0}
    )
    assert moved(named) == {Variation.PADDING}


def test_padded_tokens_are_others_that_occur():
    seen = []

    def update(batch):
        seen.append(batch["ids"])
        return known_by_zeros({"ids": np.where(batch["mask"], batch["ids"], 0)})

    batch = {"ids": IDS, "mask": MASK}
    stepcheck.probe(update, batch, padding=~MASK).require("padding", "order")
    assert {*np.unique(seen)} == {*np.unique(IDS)}
    assert any(
        np.all(ids[~MASK] > 0) and np.array_equal(ids[MASK], IDS[MASK])
        for ids in seen
    )


def test_nested_batches_keep_their_kinds_and_are_copies():
    texts = np.array([*"abcdef"])
    more = {"texts": texts, "scale": 0.5, "positions": np.zeros((1, 4))}
    batch = {"pair": (X, [BATCH["y"]]), "more": more, "name": "unchanged"}
    before = X.copy()

    def update(given):
        assert (type(given["pair"]), given["name"]) == (tuple, "unchanged")
        assert given["more"]["scale"] == 0.5
        assert given["more"]["positions"].shape == (1, 4)
        x, (y,) = given["pair"]
        order = [[*texts].index(each) for each in given["more"]["texts"]]
        x *= 1.0
        x += 1.0
        return (x - 1)[..., 0].T @ y @ np.ones(4), float(
            np.mean(order)
        ) * np.ones(1)

    report = stepcheck.probe(update, batch)
    assert np.array_equal(X, before)
    assert report.is_right, report
    assert {each.of for each in report.effects} == {
        ("more['texts']",),
        ("pair[0]",),
        ("pair[1][0]",),
        (),
    }
    assert stepcheck.probe(
        lambda rows: X[rows, 0].sum(axis=0), np.arange(6)
    ).is_right


@pytest.mark.own
def test_arrays_of_the_engine_are_given_back():
    def of_engine(values):
        return keras.ops.convert_to_tensor(values)

    batch = {name: of_engine(value) for name, value in BATCH.items()}
    batch["ids"] = of_engine(IDS.astype("int32"))
    kinds = {
        name: (type(value), value.dtype, value.shape)
        for name, value in batch.items()
    }

    def update(given):
        assert {
            n: (type(v), v.dtype, v.shape) for n, v in given.items()
        } == kinds
        counts = given["mask"] * given["sizes"][:, None]
        model = given["x"] * counts[..., None] * given["y"][..., None]
        return [keras.ops.sum(model, axis=(0, 1)) / keras.ops.sum(counts)]

    report = stepcheck.probe(update, batch, padding=~MASK)
    assert report.is_right, report
    assert Outcome.MOVES in {each.outcome for each in report.effects}


@pytest.mark.own
def test_a_model_of_keras_is_read_by_its_paths():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, name="last")]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    begin = model.get_weights()

    def update(batch):
        model.set_weights(begin)
        model.train_on_batch(*batch)
        return model

    report = stepcheck.probe(update, (X[:, 0], BATCH["y"][:, :1]))
    assert report.is_right, report
    assert {name for name, _ in report.effects[0].parameters} == {
        "sequential/last/kernel",
        "sequential/last/bias",
    }


@pytest.mark.skipif(
    find_spec("torch") is None, reason="PyTorch is not installed"
)
def test_tensors_and_modules_of_torch():
    torch = pytest.importorskip("torch")
    batch = {"x": torch.tensor(X[:, 0]).bfloat16(), "ids": torch.arange(6) % 3}

    def update(given):
        assert [(v.dtype, v.shape) for v in given.values()] == [
            (v.dtype, v.shape) for v in batch.values()
        ]
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).to(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        outputs = model(given["x"].double())
        torch.nn.functional.cross_entropy(outputs, given["ids"]).backward()
        optimizer.step()
        return model

    report = stepcheck.probe(update, batch)
    assert report.is_right, report
    assert {name for name, _ in report.effects[0].parameters} == {
        "weight",
        "bias",
    }
    assert (
        moved(stepcheck.probe(lambda batch: update(batch).parameters(), batch))
        == set()
    )
    half = stepcheck.probe(
        lambda batch: [p.bfloat16() for p in update(batch).parameters()], batch
    )
    assert half.rounding >= 0.04 or half.cause is Cause.UNSEEN


@pytest.mark.skipif(
    find_spec("torch") is None, reason="PyTorch is not installed"
)
def test_a_right_update_in_lower_precision_is_not_accused():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
    begin = torch.nn.Sequential(*layers).state_dict()
    batch = {"x": torch.tensor(X[:, 0]), "y": torch.tensor(BATCH["y"][:, :1])}

    def update(given, microbatches, make):
        model = torch.nn.Sequential(*layers)
        model.load_state_dict(
            {name: value.clone() for name, value in begin.items()}
        )
        optimizer = make(model.parameters(), 0.01)
        optimizer.zero_grad()
        for rows in torch.arange(6).chunk(microbatches):
            with torch.autocast("cpu", torch.bfloat16):
                error = (model(given["x"][rows]) - given["y"][rows]) ** 2
            (error.float().sum() / 6).backward()
        optimizer.step()
        return {
            name: value.clone() for name, value in model.state_dict().items()
        }

    begin = {name: value.clone() for name, value in begin.items()}
    for make in (torch.optim.AdamW, torch.optim.SGD):
        report = stepcheck.probe(
            lambda b, num, make=make: update(b, num, make),
            batch,
            cuts=(1, 2, 3),
        )
        assert report.findings == (), report
    assert {each.cause for each in report.unjudged} == {Cause.SMALL}, report


def test_a_small_difference_is_found_in_double_precision():
    def update(batch, num, kind):
        weights = linear(batch, num)["w"].astype(kind)
        return weights * kind(1 + 0.003 * (num - 1))

    for kind, cause in ((np.float32, Cause.SMALL), (np.float64, None)):
        report = stepcheck.probe(
            lambda b, num, kind=kind: update(b, num, kind), BATCH, cuts=2
        )
        (cut,) = (
            each for each in report.effects if each.change is Variation.CUTS
        )
        assert (cut.cause, cut.outcome is Outcome.MOVES) == (
            cause,
            cause is None,
        ), report


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"order": False}, "There must be a change"),
        ({"padding": BATCH["mask"]}, "nothing to change for padding"),
        ({"padding": MASK | True}, "nothing to change for padding"),
        ({"padding": MASK[:, :2]}, "nothing to change for padding"),
        ({"padding": {"z": MASK, "x": ~MASK}}, "nothing to change for z"),
        ({"weights": np.ones(6)}, "nothing to change for weights"),
        ({"weights": np.ones(3)}, "nothing to change for weights"),
        ({"cuts": (2,)}, "nothing to change for cuts"),
        ({"cuts": 0}, "cuts are numbers"),
        ({"batch": 3}, "Each array of the batch must have its rows"),
        (
            {"batch": {"x": X, "more": X, "starts": np.zeros(5)}},
            "Received: starts of shape (5,).",
        ),
        (
            {"batch": {"x": X, "texts": [*"abcdef"]}},
            "Received: texts[5] of shape ().",
        ),
    ],
)
def test_what_cannot_be_probed_is_said_before_anything_ran(stated, said):
    def update(*_):
        raise AssertionError("it ran")

    with pytest.raises(SpecificationError) as raised:
        stepcheck.probe(update, **{"batch": BATCH} | stated)
    assert said in str(raised.value)


def test_an_update_that_returns_no_weights():
    report = stepcheck.probe(lambda batch: None, BATCH)
    assert report.cause is Cause.UNSEEN


def test_a_change_that_does_not_exist():
    with pytest.raises(
        SpecificationError, match="Changes must be of order, padding, weights"
    ):
        probed(cuts=None).require("labels")
    with pytest.raises(AssertionError):
        probed(cuts=None).require("cuts")


def test_effects_are_values():
    effect = probed("means").findings[0]
    assert replace(effect) == effect
    assert effect.parameters == (("w", pytest.approx(effect.distance)),)
    assert (effect.change, effect.num_parameters) == ("cuts", 2)


def without_numbers(text):
    return re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "0", text).split()


@pytest.mark.own
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_the_programs_of_the_page_run(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if find_spec("triton") and "tensorflow" in sys.modules:
        pytest.skip("PyTorch with Triton, beside TensorFlow")
    for name in imported(BLOCKS[number]):
        pytest.importorskip(name)
    if (
        "tensorflow" in imported(BLOCKS[number])
        and keras.backend.backend() != "tensorflow"
    ):
        pytest.skip("a loop of TensorFlow")
    names: dict = {}
    exec(compile(BLOCKS[number], "probe.md", "exec"), names)
    tests = [each for name, each in names.items() if name.startswith("test_")]
    shown = re.match(
        r"(?:(?!```).)*?```text\n(.*?)```",
        PAGE.split(BLOCKS[number])[1][3:],
        re.S,
    )
    if "print(" in BLOCKS[number]:
        assert without_numbers(capsys.readouterr().out) == without_numbers(
            shown[1]
        )
    for each in tests:
        each()
    assert tests or "report" in names
