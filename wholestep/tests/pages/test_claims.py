"""Claims of pages and examples about their models: change inputs that must not matter, list the
weights that moved.
"""

import re
from pathlib import Path

import finetune_model
import keras
import numpy as np
import pytest
from keras import ops

import wholestep as ws

ROOT = Path(__file__).parents[2]
TOP = ROOT.parent
ENGINE = keras.backend.backend()
OF_JAX = pytest.mark.skipif(ENGINE != "jax", reason="Keras shards on JAX alone")
OF_BOTH = pytest.mark.own


def code(page, *, section="", begin="", end=""):
    """Return the code of a page, or of a section, from the line that begins with a text to another
    such line.
    """
    text = (ROOT / "docs" / page).read_text()
    if section:
        first, *others = text.split("\n## ")
        text = first + next(each for each in others if each.startswith(f"{section}\n"))
    lines = "\n" + "".join(re.findall(r"```python\n(.*?)```", text, re.S))
    start = lines.index(f"\n{begin}")
    return lines[start : lines.index(f"\n{end}", start + 1) if end else None]


def run(names, *place, **where):
    """Run a part of a page in these names."""
    exec(compile(code(*place, **where), place[0], "exec"), names)
    return names


def array(value):
    return ops.convert_to_numpy(value)


def weights_of(*models):
    return {id(v): array(v) for model in models for v in model.weights}


def moved(model, before):
    """Return the paths of the weights that have changed."""
    return {v.path for v in model.weights if np.any(array(v) != before[id(v)])}


# ---- packed rows ----

LENGTHS = [4, 5, 3]
PLACES = 16
SEGMENTS = np.pad(np.repeat([1, 2, 3], LENGTHS), (0, PLACES - sum(LENGTHS)))
POSITIONS = np.pad(
    np.concatenate([np.arange(length) for length in LENGTHS]), (0, PLACES - sum(LENGTHS))
)
TOKENS = np.where(SEGMENTS > 0, np.random.default_rng(0).integers(1, 50, PLACES), 0)
COUNTS = (POSITIONS >= 2).astype("float32")  # the first two tokens of a sequence are its prompt


def packed(tokens=TOKENS, at=slice(None)):
    """Return a batch of one packed row, with the leaves of all pages; `at`: some of its places."""
    leaves = {
        "tokens": tokens,
        "words": tokens,
        "segment_ids": SEGMENTS,
        "positions": POSITIONS,
        "weights": COUNTS,
    }
    return {name: ops.convert_to_tensor(leaf[None, at]) for name, leaf in leaves.items()}


def of_the_page():
    names = run({}, "finetune.md", end="pretraining = ")
    return names["new_task"](50), names["Answers"]()


def of_the_example():
    backbone = finetune_model.new_backbone()
    head = keras.layers.Dense(50, name="head")
    return keras.Model(backbone.input, head(backbone(backbone.input))), finetune_model.Answers()


def of_sequences():
    names = {"keras": keras, "ws": ws, "np": np, "sentences": [{"words": TOKENS}]}
    run(names, "sequences.md", begin="class SameSegment", end="ws.Trainer(packed")
    return names["packed"], names["SameSegment"]()


PACKED = {
    "finetune.md": of_the_page,
    "finetune_model.py": of_the_example,
    "sequences.md": of_sequences,
}


@pytest.fixture(scope="module", params=PACKED)
def pair(request):
    """The model of a page for packed rows, and its objective."""
    keras.utils.set_random_seed(1)
    return PACKED[request.param]()


def outputs(pair, batch):
    """Return the outputs (places, ...) of the model as the objective calls it, and the sums of the
    loss.
    """
    model, objective = pair
    seen = []

    def calling(inputs, training):
        seen.append(model(inputs, training=training))
        return seen[-1]

    total, weight = objective(calling, batch, training=False).sums()
    return array(seen[0])[0], float(total), float(weight)


def changed(places):
    """Return the tokens with others at these places."""
    return np.where(places, TOKENS % 49 + 1, TOKENS)


@OF_BOTH
@pytest.mark.parametrize("segment", [1, 2, 3])
def test_no_sequence_sees_another_one_of_its_row(pair, segment):
    is_own = segment == SEGMENTS
    before, *_ = outputs(pair, packed())
    after, *_ = outputs(pair, packed(changed(~is_own & (SEGMENTS > 0))))
    np.testing.assert_array_equal(after[is_own], before[is_own])
    assert np.all(np.any(after != before, axis=1)[~is_own & (SEGMENTS > 0)])


@OF_BOTH
@pytest.mark.parametrize("place", [1, 3, 6, 8, 11])
def test_no_place_sees_a_later_one(pair, place):
    is_later = np.arange(PLACES) >= place
    before, *_ = outputs(pair, packed())
    after, *_ = outputs(pair, packed(changed(is_later & (SEGMENTS > 0))))
    np.testing.assert_array_equal(after[~is_later], before[~is_later])
    assert np.any(after[place] != before[place])


@OF_BOTH
def test_every_place_sees_all_earlier_ones_of_its_sequence(pair):
    before, *_ = outputs(pair, packed())
    for place in np.flatnonzero(SEGMENTS):
        after, *_ = outputs(pair, packed(changed(np.arange(PLACES) == place)))
        sees = (SEGMENTS[place] == SEGMENTS) & (POSITIONS[place] <= POSITIONS)
        np.testing.assert_array_equal(np.any(after != before, axis=1), sees)


@OF_BOTH
def test_padding_of_packed_rows_does_not_enter(pair):
    before, *sums = outputs(pair, packed())
    after, *others = outputs(pair, packed(changed(SEGMENTS == 0)))
    np.testing.assert_array_equal(after[SEGMENTS > 0], before[SEGMENTS > 0])
    assert sums == others


@OF_BOTH
def test_the_loss_of_packed_rows_is_that_of_the_rows_alone(pair):
    _, total, weight = outputs(pair, packed())
    alone = [outputs(pair, packed(at=segment == SEGMENTS))[1:] for segment in (1, 2, 3)]
    assert weight == sum(each for _, each in alone) > 0
    assert total == pytest.approx(sum(each for each, _ in alone), rel=1e-5)


def test_the_prompt_does_not_count():
    """A weight counts for the token to predict, not for the token before it."""
    for make in (of_the_page, of_the_example):
        *_, weight = outputs(make(), packed())
        assert weight == COUNTS.sum()


# ---- padded rows ----


@OF_BOTH
def test_padding_weighs_nothing_in_the_loss_of_a_language_model():
    names = {"keras": keras, "ws": ws, "np": np}
    run(names, "sequences.md", begin="class NextWord", end="trainer = ")
    model = names["language"]
    objective = names["NextWord"]()
    rows = np.stack([np.pad(TOKENS[:9], (0, 3)), TOKENS[:12]])
    total, weight = objective(model, {"words": rows}, training=False).sums()
    wider = objective(model, {"words": np.pad(rows, [(0, 0), (0, 5)])}, training=False).sums()
    assert float(weight) == 8 + 11 == float(wider[1])
    assert float(total) == pytest.approx(float(wider[0]), rel=1e-6)


def later(model, given, place):
    """Return which outputs change if a place of the inputs and all later ones do."""
    other = given.copy()
    other[:, place:] = given[:, place:][:, ::-1] + 1
    before, after = (array(model(each))[0] for each in (given, other))
    return np.any(before != after, axis=1)


def test_no_place_of_a_benchmarks_sequence_model_sees_a_later_one(monkeypatch):
    monkeypatch.syspath_prepend(str(TOP))
    from benchmarks import language, models

    text = language.Language(
        num_words=60, width=16, num_layers=2, length=12, batch_size=1, num_rows=1, quick_rows=1
    )
    series, x, _ = models.wavenet()
    for model, given, place in ((text.model(), TOKENS[None, :12], 7), (series, x[:1], 200)):
        sees = later(model, given, place)
        assert not sees[:place].any()
        assert sees[place]


# ---- what trains ----


@pytest.fixture(scope="module")
def tuned():
    """The names of the page on fine-tuning once it has trained, and the weights before that."""
    names = run(
        {}, "finetune.md", end="for step in trainer.steps(data, epochs=2, checkpoints=checkpoints)"
    )
    before = weights_of(names["model"])
    run(
        names,
        "finetune.md",
        begin="for step in trainer.steps(data, epochs=2, checkpoints",
        end="def gradient(",
    )
    return names, before


LORA = ("lora_kernel_a", "lora_kernel_b", "bias")


@OF_BOTH
def test_lora_the_biases_and_the_head_move_on_the_page_and_nothing_else(tuned):
    names, before = tuned
    wanted = {f"{part}/{name}" for part in ("attention/query", "wide") for name in LORA}
    assert moved(names["model"], before) == wanted | {"head/kernel", "head/bias"}


@OF_BOTH
def test_the_page_shows_how_many_weights_train(tuned):
    names, before = tuned
    moving = [v for v in names["model"].weights if v.path in moved(names["model"], before)]
    (said,) = (
        line for line in names["trainer"].explain().split("\n") if line.startswith("Trains ")
    )
    assert f"# ... {said} ..." in code("finetune.md")
    num = sum(v.numpy().size for v in moving)
    assert said.startswith(f"Trains {num:,} of ")
    assert f"in {len(moving)} of {len(names['model'].weights)} variables" in said


@OF_BOTH
def test_lora_and_the_biases_of_queries_values_and_dense_layers_move_in_the_example(monkeypatch):
    monkeypatch.setattr(finetune_model, "WIDTH", 16)
    model, objective = of_the_example()
    finetune_model.add_lora(model.get_layer("backbone"), rank=2)
    trainer = ws.Trainer(model, objective, optimizer="adam")
    before = weights_of(model)
    for _ in range(2):  # of a product that begins at 0, one factor moves in the first update
        trainer.update(packed())
    parts = [f"attention_{i}/{part}" for i in range(2) for part in ("query", "value")]
    parts += [f"{part}_{i}" for i in range(2) for part in ("wide", "narrow")]
    wanted = {f"{part}/{name}" for part in parts for name in LORA} | {"head/kernel", "head/bias"}
    assert moved(model, before) == wanted == {v.path for v in model.trainable_variables}


@OF_JAX
@OF_BOTH
def test_the_example_shards_the_kernels_that_it_names():
    keras.distribution.set_distribution(finetune_model.sharded(2))
    try:
        model = finetune_model.new_backbone()
    finally:
        keras.distribution.set_distribution(None)
    wanted = {
        f"attention_{i}/{part}/kernel" for i in range(2) for part in ("query", "key", "value")
    }
    found = {v.path for v in model.weights if not v.value.sharding.is_fully_replicated}
    assert found == wanted | {"wide_0/kernel", "wide_1/kernel"}
    for path in (
        ROOT / "docs/finetune.md",
        TOP / "examples/finetune.py",
        TOP / "examples/finetune_model.py",
    ):
        told = " ".join(path.read_text().split())
        assert re.search("[Ss]hards? the kernels of queries, keys, values and wide layers", told)
        assert len(re.findall("[Ss]hards? the kernels", told)) == 1


# ---- recipes ----


def test_a_frozen_base_stays_while_all_else_moves():
    names = run({}, "howto.md", section="Transfer learning", end="before = base.get_weights()")
    model = names["model"]
    base = names["base"]
    before = weights_of(names["model"])
    run(
        names,
        "howto.md",
        section="Transfer learning",
        begin="before = base",
        end="base.trainable = True",
    )
    head = {v.path for v in model.weights} - {v.path for v in base.weights}
    assert moved(model, before) == head != set()
    before = weights_of(model)
    run(names, "howto.md", section="Transfer learning", begin="base.trainable = True")
    assert moved(model, before) == {v.path for v in model.weights}


def test_lora_and_biases_move_in_the_recipe_and_kernels_do_not():
    names = run({}, "recipes.md", section="LoRA", end="ws.Trainer(model")
    model = names["model"]
    before = weights_of(names["model"])
    run(names, "recipes.md", section="LoRA", begin="ws.Trainer(model")
    assert moved(model, before) == {v.path for v in model.weights if v.name in LORA}
    assert len(moved(model, before)) == 6


def test_each_side_of_a_gan_trains_its_own_model_alone():
    names = run({}, "recipes.md", section="Generative adversarial network")
    models = {"telling": names["discriminator"], "fooling": names["generator"]}
    for name, own in models.items():
        before = weights_of(*models.values())
        names[name].update(names["batch"])
        found = set.union(*(moved(model, before) for model in models.values()))
        assert found == {v.path for v in own.weights}


def test_a_teacher_moves_by_the_loop_alone():
    names = run(
        {}, "recipes.md", section="Teacher that follows by a moving average", end="for step in"
    )
    student = names["student"]
    teacher = names["teacher"]
    before = weights_of(student, teacher)
    names["trainer"].update((names["x"], names["y"]))
    assert moved(teacher, before) == set()
    assert moved(student, before) == {v.path for v in student.weights}


def test_an_augmentation_keeps_the_label_whatever_is_loaded_before():
    names = run({}, "recipes.md", section="Custom augmentation", end="jitter = ")
    rows = names["Shifted"]()
    x = names["x"]
    one = [rows[i] for i in range(len(rows))]
    other = [rows[i] for i in range(len(rows))[::-1]][::-1]
    for (features, label), (again, _) in zip(one, other, strict=True):
        np.testing.assert_array_equal(features, again)
        np.testing.assert_allclose(features[:1] - features[1:2], label, atol=1e-5)
    features = np.stack([each for each, _ in one])
    assert len(np.unique(features, axis=0)) == len(rows) > len(x)
    assert features.dtype == x.dtype


def test_an_augmentation_draws_in_training_alone():
    names = run({}, "recipes.md", section="Custom augmentation", end="shifted = ")
    x = names["x"]
    jitter = names["jitter"]
    np.testing.assert_array_equal(array(jitter(x, training=False)), x)
    first, second = (array(jitter(x, training=True)) for _ in range(2))
    assert np.all(np.any(first != x, axis=1) & np.any(first != second, axis=1))


def test_a_variable_that_an_objective_reads_is_not_trained():
    names = run({}, "recipes.md", section="A coefficient that changes while training")
    beta = float(array(names["beta"]))
    names["trainer"].update((names["x"], names["y"]))
    assert float(array(names["beta"])) == beta
