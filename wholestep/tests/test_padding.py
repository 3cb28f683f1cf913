"""`check_padding` finds padding that enters an update, and leaves no trace in the training."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from launching import only_jax

import wholestep as ws
from wholestep.padding import Effect

DRAW = np.random.default_rng(0)
LENGTHS = np.array([8, 3, 5, 2, 7, 4])
PADDING = np.arange(8) >= LENGTHS[:, None]
TOKENS = np.where(PADDING, 0, DRAW.integers(1, 20, size=(6, 8)))
LABELS = DRAW.normal(size=(6, 1)).astype("float32")


def network(*middle, length=None, optimizer="adam"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((length,), dtype="int32"), *middle, layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def words(mask_zero=True):
    return layers.Embedding(20, 4, mask_zero=mask_zero)


def mean():
    return layers.GlobalAveragePooling1D()


def recurrent():
    return layers.Bidirectional(layers.GRU(3, dropout=0.2, return_sequences=True))


def effects(report):
    return [change.effect for change in report.changes]


# ---- what enters, and what does not ----

RIGHT = {
    "mean": lambda: [words(), mean()],
    "lstm": lambda: [words(), layers.LSTM(3)],
    "dropout": lambda: [words(), recurrent(), layers.Dropout(0.3), mean()],
    "normalisation": lambda: [words(), layers.BatchNormalization(), mean()],
}
WRONG = {
    "mean": lambda: [words(mask_zero=False), mean()],
    "lstm": lambda: [words(mask_zero=False), layers.LSTM(3)],
    "lost": lambda: [words(), layers.Lambda(lambda x: x * 1.0), mean()],
}


@pytest.mark.own
@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_masks_is_right(name):
    report = ws.Trainer(network(*RIGHT[name]())).check_padding((TOKENS, LABELS), PADDING)
    assert report.is_right, report
    assert effects(report) == [Effect.MARKS, Effect.NONE]
    assert str(report).startswith("Padding does not enter the update.\n  other values at 19")


@pytest.mark.own
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_does_not_is_found(name):
    report = ws.Trainer(network(*WRONG[name]())).check_padding((TOKENS, LABELS), PADDING)
    assert not report.is_right
    assert effects(report) == [Effect.MARKS, Effect.ENTERS]
    assert "2 more padded places at the end" in str(report)
    assert "embeddings (" in str(report)
    assert str(report).endswith("If some of these leaves are not padded, name those that are.")


class NextToken(ws.Objective):
    """A loss of each place, divided by the places that are real, or by all."""

    def __init__(self, divides_by_all=False, forgets=False):
        self.divides_by_all = divides_by_all
        self.forgets = forgets

    def __call__(self, model, batch, training):
        logits = model(batch["tokens"], training=training)
        losses = keras.losses.sparse_categorical_crossentropy(
            batch["labels"], logits, from_logits=True
        )
        real = ops.cast(batch["mask"], losses.dtype)
        if self.forgets:
            return ws.Mean(losses)
        weights = ops.ones_like(real) if self.divides_by_all else real
        return ws.Mean(losses * real, weights)


def language_model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(20, 8)(tokens)
    hidden = hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(20)(hidden))


BATCH = {"tokens": TOKENS, "labels": np.roll(TOKENS, -1, axis=1), "mask": ~PADDING}


@pytest.mark.own
@pytest.mark.parametrize("padding", [PADDING, dict.fromkeys(["tokens", "labels", "mask"], PADDING)])
def test_the_loss_of_each_place_is_right_if_it_is_divided_by_real_places(padding):
    trainer = ws.Trainer(language_model(), NextToken(), optimizer="adam")
    filled = TOKENS + PADDING * DRAW.integers(1, 20, size=PADDING.shape)
    for tokens, effect in ((TOKENS, Effect.MARKS), (filled, Effect.NONE)):
        report = trainer.check_padding(BATCH | {"tokens": tokens}, padding)
        assert report.is_right, report
        assert effects(report) == [Effect.NONE, effect, Effect.NONE]  # the labels, the tokens


def test_a_loss_that_is_divided_by_all_places_or_forgets_the_mask_is_found():
    divided = ws.Trainer(language_model(), NextToken(divides_by_all=True), optimizer="adam")
    found = divided.check_padding(BATCH, PADDING)
    assert effects(found) == [Effect.NONE, Effect.MARKS, Effect.ENTERS]
    forgets = ws.Trainer(language_model(), NextToken(forgets=True), optimizer="adam")
    found = forgets.check_padding(BATCH, {"labels": PADDING})
    assert effects(found) == [Effect.ENTERS, Effect.REFUSED]  # longer labels alone


def test_a_value_that_marks_padding_may_occur_at_other_places_too():
    """As -100 does, which leaves labels out: those of padding, and those of a question."""

    class Marked(ws.Objective):
        def __call__(self, model, batch, training):
            logits = model(batch["tokens"], training=training)
            labels = batch["labels"]
            counts = labels != -100
            losses = keras.losses.sparse_categorical_crossentropy(
                ops.where(counts, labels, 0), logits, from_logits=True
            )
            return ws.Mean(losses, counts)

    labels = np.where(PADDING | (np.arange(8) < 1), -100, BATCH["labels"])
    trainer = ws.Trainer(language_model(), Marked(), optimizer="adam")
    report = trainer.check_padding({"tokens": TOKENS, "labels": labels}, PADDING)
    assert report.is_right, report
    assert effects(report) == [Effect.MARKS, Effect.MARKS, Effect.NONE]


@pytest.mark.own
@pytest.mark.parametrize("names", [["tokens"], ["tokens", "side"]])
def test_a_named_leaf_that_is_its_own_mask_keeps_its_values(names):
    """And a leaf that is not named stays as it is, though it has the axes of places."""

    class Named(ws.Objective):
        def __call__(self, model, batch, training):
            out = model([batch["tokens"], batch["side"]], training=training)
            return ws.Mean(ops.square(out[:, 0]))

    keras.utils.set_random_seed(0)
    tokens, side = keras.Input((None,), dtype="int32"), keras.Input((8,))
    both = layers.Concatenate()([mean()(words()(tokens)), layers.Dense(3)(side)])
    batch = {"tokens": TOKENS, "side": DRAW.normal(size=(6, 8)).astype("float32")}
    made = keras.Model([tokens, side], layers.Dense(1)(both))
    trainer = ws.Trainer(made, Named(), optimizer="sgd")
    report = trainer.check_padding(batch, dict.fromkeys(names, PADDING))
    if len(names) == 1:
        assert report.is_right, report
        assert effects(report) == [Effect.MARKS, Effect.NONE]
    else:
        assert Effect.ENTERS in effects(report)


@pytest.mark.own
def test_a_table_of_positions_that_ends_with_the_batch_refuses_longer_padding():
    class Positions(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(8, 4)
            self.supports_masking = True

        def call(self, x):
            return x + self.table(ops.arange(ops.shape(x)[1]))

    report = ws.Trainer(network(words(), Positions(), mean())).check_padding(
        (TOKENS, LABELS), PADDING
    )
    assert Effect.ENTERS not in effects(report), report


def test_two_sequences_of_other_lengths_have_masks_each():
    class Two(ws.Objective):
        def __call__(self, model, batch, training):
            return ws.Mean(ops.square(model([batch["a"], batch["b"]], training=training)[:, 0]))

    keras.utils.set_random_seed(0)
    inputs = [keras.Input((None,), dtype="int32") for _ in range(2)]
    shared = words()
    both = layers.Concatenate()([mean()(shared(each)) for each in inputs])
    trainer = ws.Trainer(keras.Model(inputs, layers.Dense(1)(both)), Two(), optimizer="sgd")
    batch = {"a": TOKENS, "b": TOKENS[:, :5][:, ::-1]}
    report = trainer.check_padding(batch, {"a": PADDING, "b": batch["b"] == 0})
    assert report.is_right, report
    assert "at the begin" in str(report)
    assert "at the end" in str(report)


def test_padding_at_the_begin_of_rows_is_made_longer_there():
    padding = PADDING[:, ::-1]
    batch = {name: leaf[:, ::-1] for name, leaf in BATCH.items()}

    class Bag(ws.Objective):
        def __call__(self, model, batch, training):
            real = ops.cast(batch["mask"], "float32")[..., None]
            summed = ops.sum(model(batch["tokens"], training=training) * real, axis=1)
            return ws.Mean(ops.sum(ops.square(summed), axis=-1))

    bag = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(20, 4)])
    padding = {"tokens": padding, "mask": padding}
    report = ws.Trainer(bag, Bag(), optimizer="sgd").check_padding(batch, padding)
    assert report.is_right
    assert "2 more padded places at the begin: no weight moves" in str(report)


def test_features_of_places_are_changed_by_weights_of_places():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((None, 3)), layers.Dense(4, "tanh"), layers.Dense(1)])
    by_weights = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile("rmsprop", by_weights)
    x = DRAW.normal(size=(6, 8, 3)).astype("float32")
    y = DRAW.normal(size=(6, 8, 1)).astype("float32")
    weights = np.where(PADDING, 0.0, 1.0).astype("float32")
    report = ws.Trainer(model).check_padding((x, y, weights), PADDING)
    assert report.is_right
    assert effects(report) == [Effect.NONE] * 3
    model.compile("rmsprop", "mse")  # divides by all places
    report = ws.Trainer(model).check_padding((x, y, weights), PADDING)
    assert effects(report) == [Effect.NONE, Effect.NONE, Effect.ENTERS]
    report = ws.Trainer(model).check_padding((x, y), (PADDING, None))
    assert effects(report)[0] is Effect.ENTERS


@pytest.mark.filterwarnings("ignore:.*does not support masking")
def test_a_model_of_one_length_refuses_longer_padding():
    fixed = network(words(), layers.Flatten(), length=8)
    report = ws.Trainer(fixed).check_padding((TOKENS, LABELS), PADDING)
    assert not report.is_right
    assert effects(report) == [Effect.MARKS, Effect.REFUSED]
    assert "No padding could be changed" in str(report)
    assert "refused by the model (The model takes" in str(report)


def test_random_draws_of_places_cannot_be_compared_with_those_of_longer_rows():
    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)
            self.supports_masking = True

        def call(self, x):
            return x + keras.random.normal(ops.shape(x), seed=self.seeds)

    report = ws.Trainer(network(words(), Noise(), mean())).check_padding(
        (TOKENS, LABELS), (PADDING, None)
    )
    assert effects(report)[1] is Effect.DRAWS
    assert "draws random numbers" in str(report)


@only_jax
def test_replicas_share_the_rows_that_are_checked():
    right = ws.Trainer(network(words(), mean()), replicas=2, microbatch_size=2)
    assert right.check_padding((TOKENS, LABELS), PADDING).is_right
    wrong = ws.Trainer(network(words(mask_zero=False), mean()), replicas=2)
    assert not wrong.check_padding((TOKENS, LABELS), PADDING).is_right


def test_a_step_of_ones_own_is_checked_with_its_own_optimizer():
    class Own(keras.Sequential):
        def train_step(self, *given):
            return super().train_step(*given)

    for mask_zero in (True, False):
        own = Own([keras.Input((None,), dtype="int32"), words(mask_zero), mean(), layers.Dense(1)])
        own.compile("adam", "mse")
        report = ws.Trainer(own).check_padding((TOKENS, LABELS), PADDING)
        assert report.is_right is mask_zero, report
        assert int(own.optimizer.iterations) == 0


# ---- the training around it ----


def held(model):
    return [keras.ops.convert_to_numpy(v).tobytes() for v in model.variables] + [
        keras.ops.convert_to_numpy(v).tobytes() for v in model.optimizer.variables
    ]


def trained(checks):
    keras.utils.set_random_seed(1)
    middle = words(), recurrent(), layers.Dropout(0.3), layers.BatchNormalization(), mean()
    model = network(*middle)
    trainer = ws.Trainer(model)
    losses = []
    if checks:
        trainer.check_padding((TOKENS, LABELS), PADDING)
    for step in trainer.steps(ws.Batches((TOKENS, LABELS), 4), epochs=2):
        losses.append(step.logs["loss"])
        if checks:
            trainer.check_padding((TOKENS, LABELS), PADDING)
    return held(model), losses, trainer


@pytest.mark.own
def test_a_check_between_updates_leaves_no_trace():
    plain, losses, _ = trained(checks=False)
    checked, others, trainer = trained(checks=True)
    assert checked == plain
    assert others == losses
    assert trainer.run.number == 4
    assert isinstance(trainer.model.optimizer, keras.optimizers.Adam)
    assert [layer.rate for layer in trainer.model.layers if hasattr(layer, "rate")] == [0.3]


def test_after_an_error_all_values_are_as_before():
    model = network(words(), mean())
    trainer = ws.Trainer(model)
    trainer.update((TOKENS, LABELS))
    before = held(model)
    skipping = ws.Trainer(model, on_nonfinite="skip")
    for each in (trainer, skipping):
        with pytest.raises(ws.NonFiniteError):
            each.check_padding((TOKENS, np.full_like(LABELS, np.nan)), PADDING)
    assert held(model) == before
    assert isinstance(model.optimizer, keras.optimizers.Adam)


# ---- bad input ----


@pytest.mark.parametrize(
    ("padding", "text"),
    [
        (TOKENS == 99, "Some place of the batch must be padded"),
        (PADDING[:, :4], r"bool \(6, 4\) for any leaf of a batch of batch\[0\] \(6, 8\)"),
        (TOKENS, r"int64 \(6, 8\) for any leaf"),
        ((PADDING[:, :4], None), r"bool \(6, 4\) for batch\[0\] of a batch"),
        ((TOKENS, None), r"int64 \(6, 8\) for batch\[0\]"),
        ({"words": PADDING}, r"for batch\['words'\].*nested as the batch is"),
    ],
)
def test_places_that_are_none_are_refused(padding, text):
    with pytest.raises(ws.WholestepError, match=text):
        ws.Trainer(network(words(), mean())).check_padding((TOKENS, LABELS), padding)


def test_an_update_that_moves_nothing_shows_nothing():
    still = network(words(), mean())
    trainer = ws.Trainer(still)
    with pytest.raises(ws.SpecificationError, match="must move the weights"):
        trainer.check_padding((TOKENS, LABELS, np.zeros(6, "float32")), (PADDING, None, None))
