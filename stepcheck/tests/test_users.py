"""The audit of loops as users have them: pairs that come again, sums that explode, buckets, replicas, masks."""

import keras
import numpy as np
import pytest
from audit_users import ENGINE, descend, gradient_of, train

import stepcheck
from stepcheck.report.causes import BY_NAME
from stepcheck.trace.log import Called, Log
from stepcheck.trace.rows import beside
from stepcheck.trace.windows import Piece, Rows

RNG = np.random.default_rng(0)


def square(out, y):
    return keras.ops.mean((out - y[:, None]) ** 2)


def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


# ---- pairs of words that come again with another count ----

X = RNG.normal(size=(60, 5)).astype("float32")
X[50:] = X[:10]
Y = (X.sum(1) + RNG.normal(size=60)).astype("float32")
W = RNG.uniform(0.2, 1, 60).astype("float32")
EQUAL = np.append(W[:50], W[:10])


@pytest.mark.parametrize(
    ("value", "weights", "words"),
    [
        (square, (), ""),
        (lambda out, y: keras.ops.mean((out - y) ** 2), (), "the labels of all rows"),
        (lambda out, y, w: keras.ops.mean(w[:, None] * (out - y[:, None]) ** 2), (W,), ""),
        (lambda out, y, w: keras.ops.mean(w * (out - y) ** 2), (W,), "the labels and sample weights of all rows"),
        (lambda out, y, w: keras.ops.mean(w[:, None] * (out - y) ** 2), (EQUAL,), "the labels of all rows"),
    ],
)
def test_rows_with_equal_inputs_are_told_apart_by_the_gradient(value, weights, words):
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        optimizer.apply([*map(keras.ops.array, gradients)], variables)

    with stepcheck.watch(model, (X, Y, *weights), loss="mse") as report:
        train(model, value, (X, Y, *weights), 20, move)
    assert [cause.name for cause in report.causes] == (["broadcast"] if words else []), str(report)
    assert "gradient" in report.as_json()["judged"]
    assert words in report.first_line


# ---- steps of SGD by hand ----


def summed(out, y):
    return keras.ops.sum((out - y[:, None]) ** 2)


def momentum_of(sign):
    """Return a step with momentum 0.9 that goes down or up."""
    kept = {}

    def move(variables, gradients):
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            kept[i] = 0.9 * kept.get(i, 0) + gradient
            variable.assign(variable - sign * 0.01 * kept[i])

    return move


@pytest.mark.parametrize(
    ("value", "size", "move", "rate", "causes"),
    [
        (square, 16, descend(0.01), 0.01, []),
        (summed, 16, descend(0.01), 0.01, ["never divided"]),  # 12 rows at the end of a pass
        (summed, 12, descend(0.01), 0.01, ["never divided"]),
        (summed, 16, descend(0.07), None, ["never divided"]),
        (lambda out, y: summed(out, y) / 16, 16, descend(0.05), None, ["divided by the full batch"]),
        (square, 10, descend(0.1), 0.01, []),  # another rate than that of an optimizer that makes no step
        (square, 12, momentum_of(1), 0.01, []),
        (square, 12, momentum_of(-1), 0.01, ["ascent"]),
    ],
)
def test_a_sum_of_rows_is_no_rate(value, size, move, rate, causes):
    model, x = network(), RNG.normal(size=(60, 5)).astype("float32")
    model.compile(None if rate is None else keras.optimizers.SGD(rate), "mse")
    with stepcheck.watch(model, (x, x.sum(1)), loss="mse") as report:
        train(model, value, (x, x.sum(1)), size, move, passes=3)
    assert [cause.name for cause in report.causes] == causes, str(report)
    assert not any("begins anew" in note for note in report.notes)


def test_steps_that_reach_no_variable_are_said_first():
    model, x = network(), RNG.normal(size=(24, 5)).astype("float32")
    with stepcheck.watch(model, (x, x.sum(1)), loss="mse") as report:
        train(model, square, (x, x.sum(1)), 8, lambda variables, gradients: None)
    assert report.first_line.startswith("No weight moves: gradients are taken of the same rows again")


@pytest.mark.parametrize(
    ("sign", "first"), [(-1, "The steps move sequential/dense/bias"), (0.5, "Not judged: the optim")]
)
def test_a_step_by_hand_with_another_sign_for_some_variables_is_told(sign, first):
    def move(variables, gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(variable - 0.1 * (gradient if len(variable.shape) > 1 else sign * gradient))

    model, x = network(), RNG.normal(size=(24, 5)).astype("float32")
    with stepcheck.watch(model, (x, x.sum(1)), loss="mse") as report:
        train(model, square, (x, x.sum(1)), 8, move)
    assert report.first_line.startswith(first), str(report)
    assert report.causes == []


def test_variables_that_a_step_by_hand_never_moves_are_said_first():
    model, x = network(), RNG.normal(size=(24, 5)).astype("float32")
    with stepcheck.watch(model, (x, x.sum(1)), loss="mse") as report:
        train(model, square, (x, x.sum(1)), 8, lambda variables, gradients: descend(0.1)(variables[2:], gradients[2:]))
    assert report.first_line.startswith("Half of the model is never trained: 2 of 4 variables never move"), str(report)


@pytest.mark.skipif(ENGINE != "jax", reason="the loop is JAX's")
@pytest.mark.parametrize("is_by_hand", [True, False])
def test_statistics_that_a_loop_by_hand_leaves_behind_are_named(is_by_hand):
    import jax

    x, layers = RNG.normal(3, 2, size=(24, 5)).astype("float32"), keras.layers
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def loss(params, others, x):
        out, others = model.stateless_call(params, others, x, training=True)
        return keras.ops.mean((out - x[:, :1]) ** 2), others

    with stepcheck.watch(model, (x, x[:, :1]), loss="mse") as report:
        params, others, slots = (
            [v.value for v in kind]
            for kind in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        )
        for start in [*range(0, 24, 4)] * 9:  # more updates than are kept
            gradients, others = jax.grad(loss, has_aux=True)(params, others, x[start : start + 4])
            if is_by_hand:
                params = [p - 0.01 * g for p, g in zip(params, gradients, strict=True)]
            else:
                params, slots = optimizer.stateless_apply(slots, gradients, params)
        for variable, value in zip(model.trainable_variables, params, strict=True):
            variable.assign(value)
    assert "statistics never written back" in [cause.name for cause in report.causes]


@pytest.mark.parametrize(
    ("rate", "value", "causes", "words"),
    [
        (0.05, square, [], ""),
        (0.6, square, [], ""),  # 12 rows times 0.05, but a number of the script
        (0.002, summed, [], "0.024 is 12 rows times 0.002: does the loop take the sum"),  # it has no name
        (float("12e-2"), square, [], "0.12 is 12 rows times 0.01: does"),  # which others here have, and other numbers
    ],
)
def test_a_rate_that_is_a_number_of_the_script_times_the_rows_is_a_sum(rate, value, causes, words):
    model, x = network(), 0.2 * RNG.normal(size=(60, 5)).astype("float32")
    with stepcheck.watch(model, (x, x.sum(1)), loss="mse") as report:
        train(model, value, (x, x.sum(1)), 12, descend(rate))
    assert [cause.name for cause in report.causes] == causes, str(report)
    assert (words in " ".join(report.notes), "rows times" in " ".join(report.notes)) == (True, bool(words)), str(report)


BY_PLAIN_STEPS = """
x = rng.normal(size=(44, 5)).astype("float32")
y = x.sum(1)
model, SIZE = network(), 8
RATE = 0.005
step = gradients_of(model, lambda out, b: keras.ops.sum((out[:, 0] - b) ** 2))
for epoch in range(3):
    order = rng.permutation(44)
    for start in range(0, 44, SIZE):
        rows = order[start : start + SIZE]
        for v, g in zip(model.trainable_variables, step(x[rows], y[rows])):
            v.assign(v - RATE * keras.ops.convert_to_tensor(g))
"""
BY_TAPE = """
import tensorflow as tf


def gradients_of(model, value):
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = value(model(a, training=True), b)
        return tape.gradient(loss, model.trainable_variables)

    return step
"""
BY_JAX = """
import jax


def gradients_of(model, value):
    def at(values, a, b):
        return value(model.stateless_call(values, [], a, training=True)[0], b)

    gradient = jax.grad(at)
    return lambda a, b: gradient([v.value for v in model.trainable_variables], a, b)
"""


def first_of_all(own, kept=[]):  # noqa: B006
    """Return the statistics of the first call again and again."""
    kept[:] = kept or own
    return [*kept]


@pytest.mark.skipif(ENGINE != "jax", reason="the loop is JAX's")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda own: own, "Nothing found"),
        (first_of_all, "Statistics thrown away"),
        (lambda own: own[::-1], "Are they assigned in another order?"),
        (lambda own: [0.9 * each for each in own], "moving_variance are these times 0.9. Is a decay"),
        (lambda own: [0 * own[0], own[1]], "moving_mean. Does another pass of the model, or other code, change them?"),
    ],
)
def test_statistics_that_are_carried_otherwise_are_said(change, words):
    import jax

    x, layers = RNG.normal(3, 2, size=(24, 5)).astype("float32"), keras.layers
    model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(1)])

    def loss(params, others, x):
        out, others = model.stateless_call(params, others, x, training=True)
        return keras.ops.mean((out - x[:, :1]) ** 2), others

    with stepcheck.watch(model, (x, x[:, :1]), loss="mse") as report:
        params, others = (
            [v.value for v in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
        )
        for start in [*range(0, 24, 4)] * 2:
            gradients, others = jax.grad(loss, has_aux=True)(params, others, x[start : start + 4])
            others = change(others)
            params = [p - 0.01 * g for p, g in zip(params, gradients, strict=True)]
    assert words in " ".join([report.first_line, *report.notes]), str(report)
    assert (words in report.first_line) != ("Does another pass" in words), str(report)


# ---- padded batches in buckets, and masks ----

LENGTHS = np.tile([2, 3, 4, 5, 6], 8)
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], RNG.integers(1, 9, size=(40, 6)), 0)
MASK = (TOKENS != 0).astype("float32")


def own_loss(y, logits):
    return keras.ops.categorical_crossentropy(keras.ops.one_hot(y, 3) * 0.9 + 0.1 / 3, logits, from_logits=True)


def in_buckets(value, parts=1):
    """Return the report on a tagger whose batches are as wide as their longest rows need."""
    keras.utils.set_random_seed(0)
    layers, optimizer = keras.layers, keras.optimizers.SGD(0.1)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(9, 6), layers.Dense(3)])
    optimizer.build(model.trainable_variables)
    gradient, rng = gradient_of(model, value), np.random.default_rng(1)
    with stepcheck.watch(model, (TOKENS, TOKENS % 3, MASK), loss=own_loss) as report:
        for width, shortest in ((4, 0), (6, 5), (4, 0), (6, 5)):
            rows = rng.permutation(np.flatnonzero((width >= LENGTHS) & (shortest <= LENGTHS)))
            cut = [TOKENS[own, :width] for own in np.array_split(rows, parts)]
            grads = [gradient(x, x % 3, (x != 0).astype("float32")) for x in cut]
            sums = [keras.ops.array(sum(map(np.asarray, each)) / parts) for each in zip(*grads, strict=True)]
            optimizer.apply(sums, model.trainable_variables)
    return report


def by_mask(out, y, mask):
    return keras.ops.sum(own_loss(y, out) * mask) / keras.ops.sum(mask)


def by_place(out, y, mask):
    return keras.ops.mean(own_loss(y, out) * mask)


def test_weights_that_are_a_mask_may_divide():
    for value, words in ((by_mask, "Judged is a mean over those of weight 1"), (by_place, "If a mean over those")):
        report = in_buckets(value)
        assert (report.causes, report.notes[-1:] == [n for n in report.notes if words in n]) == ([], True), str(report)


def test_microbatches_in_buckets_are_judged_by_the_weights_of_a_mask():
    report = in_buckets(by_mask, parts=3)
    assert [cause.name for cause in report.causes] == ["mean of means"], str(report)


def test_rows_that_begin_alike_are_not_equal():
    rows = Rows(np.array([[7, 8, 0, 0], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]]))
    assert rows.find([np.array([[7, 8]])]).tolist() == [0]  # a narrow batch
    assert rows.find([np.array([[1, 2, 3, 4], [1, 2, 5, 6]])]).tolist() == [1, 2]
    assert [rows.twins(np.array([row])) for row in range(4)] == [False, False, True, True]


def test_a_row_that_no_array_holds_is_no_padding():
    model, x = network(), RNG.normal(size=(24, 5)).astype("float32")
    model.compile("sgd", "mse")
    own = x.copy()
    own[[0, 8, 16]] += 1
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(own, own[:, :1], batch_size=8, shuffle=False, verbose=0)
    assert (report.causes, report.as_json()["has_seen"]) == ([], False), str(report)


@pytest.mark.parametrize("num", [0, 2])
def test_updates_of_other_rows_are_said_not_to_be_judged(num):
    model, x = network(), RNG.normal(size=(24, 5)).astype("float32")
    model.compile("sgd", "mse")
    own = x.copy()
    own[: 8 * num] += 1
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        model.fit(own, own[:, :1], batch_size=8, shuffle=False, epochs=2, verbose=0)
    told = f" Not judged: {2 * num} of 6 updates, whose rows are not in `data`."
    assert report.first_line.endswith(told) == bool(num), str(report)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (lambda out, y, w: keras.ops.sum((out - y)[:, 0] ** 2 * w) / keras.ops.sum(w), []),
        (lambda out, y, w: keras.ops.mean((out - y) ** 2), ["padding trained on"]),
        (lambda out, y, w: keras.ops.mean((out - y)[:, 0] ** 2 * w), ["padding counted"]),
        (lambda out, y, w: keras.ops.sum((out - y)[:, 0] ** 2 * w), ["never divided"]),
    ],
)
def test_copies_of_a_row_that_fill_up_a_short_batch_do_not_count(value, names):
    model, x, optimizer = network(), RNG.normal(size=(22, 5)).astype("float32"), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    gradient, rng = gradient_of(model, value), np.random.default_rng(1)
    with stepcheck.watch(model, (x, x[:, :1]), loss="mse", optimizer=optimizer) as report:
        for _ in range(2):
            order = rng.permutation(22)
            for start in (0, 8, 16):
                rows = order[start : start + 8]
                weights = np.arange(8) < len(rows)
                rows = np.append(rows, np.zeros(8 - len(rows), int))
                optimizer.apply(gradient(x[rows], x[rows, :1], weights.astype("float32")), model.trainable_variables)
    assert ([cause.name for cause in report.causes], report.notes) == (names, []), str(report)


def test_the_numbers_of_an_explanation_are_those_that_differ():
    model, x, optimizer = network(), RNG.normal(size=(24, 5)).astype("float32"), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    gradient, rng = gradient_of(model, lambda out, y: keras.ops.mean((out - y) ** 2)), np.random.default_rng(1)
    with stepcheck.watch(model, (x, x[:, :1]), loss="mse", optimizer=optimizer) as report:
        for number in (0.37, 0.81, 0.52, 0.66):
            parts = [gradient(x[rows], x[rows, :1]) for rows in np.split(rng.permutation(24), 6)]
            counts = [1, 1, 1, 1, 1, number]
            total = [sum(c * g for c, g in zip(counts, each, strict=True)) / 6 for each in zip(*parts, strict=True)]
            optimizer.apply(total, model.trainable_variables)
    (cause,) = report.causes
    assert "counts 0.37, 0.52, 0.66, 0.81, ... times what it should" in cause.explanation, str(report)


def test_rows_drawn_with_replacement_are_no_padding():
    model, x, rng = network(), RNG.normal(size=(24, 5)).astype("float32"), np.random.default_rng(0)
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        for _ in range(9):
            rows = np.append(rng.integers(24, size=6), [3, 3])
            model.train_on_batch(x[rows], x[rows, :1])
    assert (report.causes, report.notes) == ([], [BY_NAME["drawn with replacement"].explanation]), str(report)


# ---- replicas ----


def test_short_batches_on_replicas_are_kept_beyond_the_first_updates():
    log, order = Log(room=40), 0

    def call(replica, rows):
        x = np.zeros((rows, 2))
        log.add(Called(order, [x], [], [], [], True, None, replica))
        return log.wants([x], replica)

    assert all(call(replica, 32) for replica in range(4))
    log.room = 0
    assert [log.wants([np.zeros((rows, 2))], replica) for replica in range(4) for rows in (32, 27)] == [False, True] * 4


# ---- optimizers, schedules and printed losses of a loop by hand ----


def adam_by(count_of):
    """Return a step of Adam by hand, whose moments are corrected by a count of (updates, passes) so far."""
    state, num = {}, [0]

    def move(variables, gradients):
        num[0] += 1
        count = count_of(num[0], 1 + (num[0] - 1) // 5)
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            first, second = state.get(i, (0.0, 0.0))
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            state[i] = first, second
            step = (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)) ** 0.5 + 1e-7)
            variable.assign(variable - 0.01 * step)

    return move


ROWS = RNG.normal(size=(60, 5)).astype("float32")
LABELS = ROWS.sum(1)


@pytest.mark.parametrize(("count_of", "is_wrong"), [(lambda step, _: step, False), (lambda _, of_pass: of_pass, True)])
def test_moments_that_are_corrected_by_the_number_of_the_pass_are_said(count_of, is_wrong):
    model = network()
    with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
        train(model, square, (ROWS, LABELS), 12, adam_by(count_of), passes=4)
    words = "by the number of the pass" if is_wrong else "Nothing found in 19 updates"
    assert words in report.first_line, str(report)


def test_a_rate_of_adam_has_no_factor_of_the_gradient():
    model = network()
    model.compile(keras.optimizers.Adam(0.01 / 12), "mse")  # the loop's rate is 12 times this one, by chance
    with stepcheck.watch(model, (ROWS, LABELS)) as report:
        train(model, square, (ROWS, LABELS), 12, adam_by(lambda step, _: step), passes=4)
    assert (report.causes, "here by 0.01 times" in report.notes[0]) == ([], True), str(report)


def by_rates(rates, momentum=0.0, clip=None):
    """Return a step with momentum at a rate for each update, perhaps clipped variable by variable."""
    moves, num = {}, [0]

    def move(variables, gradients):
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            gradient = np.asarray(gradient)
            gradient = gradient if clip is None else gradient * min(1, clip / np.linalg.norm(gradient))
            moves[i] = momentum * moves.get(i, 0.0) + rates[num[0]] * gradient
            variable.assign(variable - moves[i])
        num[0] += 1

    return move


FALLING = keras.optimizers.schedules.PolynomialDecay(0.05, 20, 0.0)
MOMENTUM = {"momentum": 0.9}


@pytest.mark.parametrize(
    ("move", "optimizer", "causes", "words"),
    [
        (by_rates([float(FALLING(i)) for i in range(20)], 0.9), keras.optimizers.SGD(FALLING, **MOMENTUM), [], ""),
        (
            by_rates([0.05] * 5 + [float(FALLING(1))] * 5 + [float(FALLING(2))] * 5 + [float(FALLING(3))] * 5, 0.9),
            keras.optimizers.SGD(FALLING, **MOMENTUM),
            ["not known"],
            "that of the number of the pass",
        ),
        (by_rates([0.1, 0.05, 0.02, 0.01] + [0.0] * 16, 0.9), None, [], "Nothing found in 19 updates"),
        (by_rates([0.005] * 20, 0.9), keras.optimizers.SGD(0.05, **MOMENTUM), ["not known"], "0.05 was meant"),
        (
            by_rates([0.05] * 20, 0.9, clip=0.5),
            keras.optimizers.SGD(0.05, **MOMENTUM, global_clipnorm=0.5),
            ["clipped otherwise"],
            "",
        ),
        (
            by_rates([0.05] * 20, 0.9, clip=0.5),
            keras.optimizers.Adam(0.05),
            [],
            "Not judged: the optimizer step is your",
        ),
    ],
)
def test_steps_by_hand_are_judged_by_the_optimizer_that_is_stated(move, optimizer, causes, words):
    model = network()
    with stepcheck.watch(model, (ROWS, LABELS), loss="mse", optimizer=optimizer) as report:
        train(model, square, (ROWS, LABELS), 12, move, passes=4)
    assert [cause.name for cause in report.causes] == causes, str(report)
    assert words in report.first_line


def test_losses_that_are_printed_are_judged_in_the_first_passes_of_a_long_loop():
    model = network()
    for divisor, causes in ((5, []), (60, ["printed: means over rows"])):
        printed, move = [], descend(0.01)
        with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
            gradient, rng = gradient_of(model, square), np.random.default_rng(1)
            for _ in range(10):  # of 50 updates 40 are kept
                total, order = 0.0, rng.permutation(60)
                for rows in np.split(order, 5):
                    total += float(square(model(ROWS[rows], training=True), LABELS[rows]))
                    move(model.trainable_variables, gradient(ROWS[rows], LABELS[rows]))
                printed.append(total / divisor)
        report.printed(loss=printed)
        assert [cause.name for cause in report.causes] == causes, str(report)


def test_a_few_updates_on_other_rows_are_said_first():
    model, others = network(), RNG.normal(size=(12, 5)).astype("float32")
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (ROWS, LABELS)) as report:
        for _ in range(2):
            model.fit(ROWS, LABELS, batch_size=12, verbose=0)
            model.train_on_batch(others, others.sum(1))
    assert report.first_line.startswith("2 of 12 updates are made on other rows than those of the data: updates 6, 12")


@pytest.mark.parametrize(("optimizer", "causes"), [("adamw", ["decayed twice"]), ("adam", [])])
def test_a_decay_by_hand_before_the_step_is_one_per_update(optimizer, causes):
    model, optimizer = network(), keras.optimizers.get(optimizer)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        for variable in variables:
            variable.assign(0.99 * variable)
        optimizer.apply([*map(keras.ops.array, gradients)], variables)

    with stepcheck.watch(model, (ROWS, LABELS)) as report:
        train(model, square, (ROWS, LABELS), 12, move)
    assert [cause.name for cause in report.causes] == causes, str(report)
    assert "gradient" in report.as_json()["judged"]


@pytest.mark.skipif(ENGINE != "jax", reason="the loop is JAX's")
def test_gradients_at_the_weights_of_the_beginning_of_a_pass_are_said_first():
    import jax

    model, optimizer = network(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def loss(params, x, y):
        return square(model.stateless_call(params, [], x, training=True)[0], y)

    with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
        params, slots = ([v.value for v in kind] for kind in (model.trainable_variables, optimizer.variables))
        for seed in range(2):
            first = params
            for rows in np.split(np.random.default_rng(seed).permutation(60), 5):
                gradients = jax.grad(loss)(first, ROWS[rows], LABELS[rows])
                params, slots = optimizer.stateless_apply(slots, gradients, params)
    assert report.first_line.startswith("The gradients of updates 2, 3, 4, 5, 7, 8"), str(report)
    assert report.causes == []


def test_a_penalty_in_place_of_the_decay_that_is_meant_is_said():
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        sums = [
            keras.ops.array(gradient + 0.1 * np.asarray(v)) for v, gradient in zip(variables, gradients, strict=True)
        ]
        optimizer.apply(sums, variables)

    with stepcheck.watch(
        model, (ROWS, LABELS), loss="mse", optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1)
    ) as report:
        train(model, square, (ROWS, LABELS), 12, move)
    assert report.first_line.endswith(
        "The optimizer that is meant decays them beside the gradient, by weight_decay=0.1."
    )


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_window_that_is_carried_over_is_no_batch_with_rows_twice(is_shuffled):
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    gradient, sums = gradient_of(model, square), []
    with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
        for epoch in range(6):
            order = np.random.default_rng(epoch).permutation(60) if is_shuffled else np.arange(60)
            for rows in np.split(order, 10):  # each third one makes an update
                sums.append([np.asarray(g) / 3 for g in gradient(ROWS[rows], LABELS[rows])])
                if len(sums) == 3:
                    optimizer.apply([*map(sum, zip(*sums, strict=True))], model.trainable_variables)
                    sums.clear()
    assert report.causes[0].name == "window carried over the epoch", str(report)
    assert report.causes[0].updates[0] == 4
    assert "rows twice in a pass" not in [cause.name for cause in report.causes]


def test_a_rest_that_is_carried_over_is_judged_beside_even_windows():
    model, rng = network(), np.random.default_rng(1)
    gradient, optimizer = gradient_of(model, square), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
        sums = [0.0] * 4
        for _ in range(2):
            for i, rows in enumerate(np.split(rng.permutation(60), range(8, 60, 8))):  # seven of 8 rows, one of 4
                sums = [a + np.asarray(b) / 3 for a, b in zip(sums, gradient(ROWS[rows], LABELS[rows]), strict=True)]
                if i % 3 == 2:
                    optimizer.apply([*map(keras.ops.array, sums)], model.trainable_variables)
                    sums = [0.0] * 4
    assert "window carried over the epoch" in [cause.name for cause in report.causes], str(report)
    assert not any("Error" in each for each in report.unseen)


# ---- padding ----

TAGS = TOKENS % 4 + (TOKENS > 0)
PER_PLACE = {
    "counted": lambda values, mask: keras.ops.mean(values),
    "masked": lambda values, mask: keras.ops.sum(values * mask) / keras.ops.sum(mask),
}


@pytest.mark.parametrize("name", PER_PLACE)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_padding_that_counts_in_the_loss_is_said_first(name, is_one_hot):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(9, 4), keras.layers.Dense(6)])
    optimizer, is_fault = keras.optimizers.Adam(0.01), name == "counted"
    optimizer.build(model.trainable_variables)

    def value(out, y):
        values = keras.ops.categorical_crossentropy(keras.ops.one_hot(y, 6), out, from_logits=True)
        return PER_PLACE[name](values, keras.ops.cast(y != 0, "float32"))

    def move(variables, gradients):
        optimizer.apply([*map(keras.ops.array, gradients)], variables)

    of = keras.losses.CategoricalCrossentropy if is_one_hot else keras.losses.SparseCategoricalCrossentropy
    weights = [] if is_fault else [(TAGS != 0).astype("float32")]
    data = TOKENS, np.eye(6)[TAGS] if is_one_hot else TAGS, *weights
    with stepcheck.watch(model, data, of(from_logits=True, reduction="mean_with_sample_weight")) as report:
        train(model, value, (TOKENS, TAGS), 8, move)
    told = "The loss counts the padding: "
    assert (report.causes, report.first_line.startswith(told), report.has_likely) == ([], is_fault, is_fault), report


@pytest.mark.parametrize(
    ("is_masked", "has_more", "causes"),
    [(True, False, []), (True, True, []), (False, False, ["mask ignored"])],
)
def test_a_loss_may_return_values_and_weights(is_masked, has_more, causes):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(9, 4), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    rows = RNG.uniform(0.5, 2, len(TOKENS)).astype("float32") if has_more else np.ones(len(TOKENS), "float32")

    def with_weights(y, out):
        return own_loss(y, out), keras.ops.cast(y != 0, "float32")

    def value(out, y, w):
        values, own = with_weights(y, out)
        own = (own if is_masked else 1.0) * keras.ops.convert_to_tensor(w)[:, None]
        return keras.ops.sum(values * own) / keras.ops.sum(own + 0 * values)

    def move(variables, gradients):
        optimizer.apply([*map(keras.ops.array, gradients)], variables)

    with stepcheck.watch(model, (TOKENS, TOKENS % 3, *[rows] * has_more), with_weights) as report:
        train(model, value, (TOKENS, TOKENS % 3, rows), 8, move)
    assert ([each.name for each in report.causes], "gradient" in report.as_json()["judged"]) == (causes, True), report


def test_a_state_that_is_never_left_is_no_padding():
    states = np.where(np.arange(7) < LENGTHS[:, None], RNG.integers(0, 3, size=(40, 7)), 3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(9, 4), keras.layers.Dense(6)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with stepcheck.watch(model, (states[:, :-1], states[:, 1:])) as report:
        model.fit(states[:, :-1], states[:, 1:], batch_size=8, epochs=2, verbose=0)
    assert report.first_line.startswith("Nothing found in 10 updates"), str(report)


# ---- the order of the rows ----


def test_one_row_that_comes_twice_hides_no_order():
    x, model = RNG.normal(size=(40, 5)).astype("float32"), network()
    x[33] = x[5]
    model.compile("sgd", "mse")
    with stepcheck.watch(model, (x, x[:, :1])) as report:
        for start in [*range(0, 32, 8)] * 3:  # neither shuffled nor whole
            model.train_on_batch(x[::-1][start : start + 8], x[::-1][start : start + 8, :1])
    assert [cause.name for cause in report.causes] == ["rows never used", "same order every pass"], str(report)


@pytest.mark.parametrize(
    ("buffer", "is_sorted", "told"),
    [
        (20, True, "in a window that is smaller than the data"),
        (20, False, "It is of 20 of 400 rows."),
        (1, False, "So far the rows come in the order of the data"),
        (400, True, ""),
        (400, False, ""),
    ],
)
@pytest.mark.parametrize("part", [400, 160])
def test_rows_that_are_shuffled_inside_of_a_window_are_said_in_the_first_pass(buffer, is_sorted, told, part):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5)).astype("float32")
    x[:, 0] = np.sort(x[:, 0]) if is_sorted else x[:, 0]
    model = network()
    model.compile("sgd", "mse")
    held, order = [*range(part)], []
    while held:  # as `Dataset.shuffle` does
        order.append(held.pop(int(rng.integers(min(buffer, len(held))))))
    with stepcheck.watch(model, (x, x.sum(1))) as report:
        for start in range(0, 120, 8):
            rows = order[start : start + 8]
            model.train_on_batch(x[rows], x[rows].sum(1))
    notes, window = " ".join(report.notes), "The rows are shuffled in a window"
    assert (told in notes, window in notes) == (True, buffer == 20), str(report)
    assert report.has_likely == (buffer == 20 and is_sorted), str(report)
    assert ("order of the data" in notes) == (buffer == 1), str(report)


# ---- what a step leaves out, and what a loop leaves behind ----

U = RNG.normal(size=(96, 5)).astype("float32")
V = (3 * U[:, 0] - 2 * U[:, 1]).astype("float32")


def with_constraint():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5))
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(1)])


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_constraint_that_no_step_applies_is_said_first(is_by_hand):
    model, optimizer = with_constraint(), keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)
    by_keras = lambda variables, gradients: optimizer.apply([*map(keras.ops.array, gradients)], variables)  # noqa: E731
    with stepcheck.watch(model, (U, V), loss="mse", optimizer=optimizer) as report:
        train(model, square, (U, V), 12, descend(0.05) if is_by_hand else by_keras)
    assert ("No step applies the constraint of" in report.first_line) == is_by_hand, str(report)
    assert report.first_line.startswith("Nothing found") != is_by_hand


@pytest.mark.parametrize("is_finalized", [False, True])
def test_an_average_that_the_optimizer_keeps_and_the_model_never_gets_is_told(is_finalized):
    model = network()
    model.compile(optimizer := keras.optimizers.Adam(0.01, use_ema=True), "mse")
    optimizer.build(model.trainable_variables)
    move = lambda variables, gradients: optimizer.apply([*map(keras.ops.array, gradients)], variables)  # noqa: E731
    with stepcheck.watch(model, (U, V)) as report:
        train(model, square, (U, V), 12, move)
        if is_finalized:
            optimizer.finalize_variable_values(model.trainable_variables)
    assert any("`use_ema`" in note for note in report.notes) != is_finalized, report.notes
    assert (report.causes, len(report.notes)) == ([], 1 - is_finalized)


def test_the_average_that_fit_puts_in_the_model_is_no_fault():
    model = network()
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
    with stepcheck.watch(model, (U, V)) as report:
        model.fit(U, V, batch_size=12, epochs=2, verbose=0)
    assert report.first_line.startswith("Nothing found"), str(report)
    assert not any("average" in note for note in report.notes)


def test_weights_that_are_rounded_between_updates_are_told():
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        optimizer.apply([*map(keras.ops.array, gradients)], variables)
        for variable in variables:
            variable.assign(keras.ops.cast(keras.ops.cast(variable, "bfloat16"), "float32"))

    with stepcheck.watch(model, (U, V), loss="mse") as report:
        train(model, square, (U, V), 12, move)
    assert any("by no optimizer step: all are rounded to bfloat16." in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("factor", "passes", "first"),
    [
        (0.9, 2, "The learning rate falls from 0.01 to 0.002059 in 16 updates, by the factor 0.9 in each"),
        (lambda count: 1 / (1 + count**3), 4, "The learning rate falls from 0.01 to"),
        (0.98, 2, "Nothing found in 16 updates"),
    ],
)
def test_a_rate_that_falls_in_each_update_is_said_first(factor, passes, first):
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    count = 0

    def move(variables, gradients):
        nonlocal count
        optimizer.apply([*map(keras.ops.array, gradients)], variables)
        count += 1
        optimizer.learning_rate = 0.01 * (factor**count if isinstance(factor, float) else factor(count))

    with stepcheck.watch(model, (U, V), loss="mse") as report:
        train(model, square, (U, V), 12, move, passes)
    assert report.first_line.startswith(first), report.first_line


SCHEDULES = {
    "cosine": keras.optimizers.schedules.CosineDecay(0.01, 64),
    "exponential": keras.optimizers.schedules.ExponentialDecay(0.05, 8, 0.3),
    "square": keras.optimizers.schedules.PolynomialDecay(0.01, 64, 1e-6, power=2),
}


@pytest.mark.parametrize(("name", "is_by_hand"), [*((name, False) for name in SCHEDULES), ("cosine", True)])
def test_a_schedule_that_ends_near_0_is_no_fault(name, is_by_hand):
    """Each is the schedule of the loop's own optimizer, which the audit was not given."""
    model, schedule, count = network(), SCHEDULES[name], 0
    optimizer = keras.optimizers.Adam(0.01 if is_by_hand else schedule)
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        nonlocal count
        if is_by_hand:
            optimizer.learning_rate = float(schedule(count))
        optimizer.apply([*map(keras.ops.array, gradients)], variables)
        count += 1

    with stepcheck.watch(model, (U, V), loss="mse") as report:
        train(model, square, (U, V), 12, move, passes=8)
    assert report.first_line.startswith("Nothing found in 64 updates"), str(report)
    assert report.notes == []


@pytest.mark.parametrize("num", [304, 320])
def test_gradients_that_wait_for_more_at_the_end_were_not_skipped(num):
    model = network()
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4), "mse")
    x = RNG.normal(size=(num, 5)).astype("float32")
    with stepcheck.watch(model, (x, x.sum(1))) as report:
        model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0)
    assert not any("skipped" in note for note in report.notes), report.notes
    waiting = "2 gradients at the end made no update: the optimizer waits for more of them."
    assert (waiting in report.notes) == (num == 304)


@pytest.mark.skipif(ENGINE != "jax", reason="stateless steps")
@pytest.mark.parametrize(("is_assigned", "is_reset"), [(True, False), (False, True), (False, False)])
def test_stateless_steps_have_their_own_rate_and_state(is_assigned, is_reset):
    import jax

    model, optimizer = network(), keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables, optimizer.variables
    weights, first = ([v.value for v in group] for group in variables)

    @jax.jit
    def step(weights, slots, x, y):
        def loss(weights):
            return square(model.stateless_call(weights, [], x, training=True)[0], y)

        return optimizer.stateless_apply(slots, jax.grad(loss)(weights), weights)

    slots, rng = first, np.random.default_rng(1)
    with stepcheck.watch(model, (U, V)) as report:
        for i in range(3):
            if is_assigned:
                optimizer.learning_rate = 0.01 * 0.5**i
            slots = first if is_reset else slots
            for rows in np.split(rng.permutation(96), 8):
                weights, slots = step(weights, slots, U[rows], V[rows])
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.assign(value)
    told = "`optimizer.learning_rate` is 0.0025 after the loop, and every update has 0.01"
    assert report.first_line.startswith(told) == is_assigned, str(report)
    assert report.first_line.startswith("Optimizer state thrown away.") == is_reset
    if is_reset:
        assert "It begins anew at update 9, 17." in report.causes[0].detail


@pytest.mark.parametrize("has_norm", [True, False])
def test_rows_that_fill_up_a_batch_count_in_statistics(has_norm):
    keras.utils.set_random_seed(0)
    norms = [keras.layers.BatchNormalization()] * has_norm
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), *norms, keras.layers.Dense(1)])
    model.compile(optimizer := keras.optimizers.Adam(0.01), "mse")
    optimizer.build(model.trainable_variables)

    def value(out, y, w):
        return keras.ops.sum(w * (out[:, 0] - y) ** 2) / keras.ops.sum(w)

    rng = np.random.default_rng(1)
    with stepcheck.watch(model, (U, V)) as report:
        for _ in range(2):
            order = rng.permutation(96)
            for start in range(0, 96, 20):
                rows = order[start : start + 20]
                x, y, w = (np.zeros((20, *part.shape[1:]), "float32") for part in (U, V, V))
                x[: len(rows)], y[: len(rows)], w[: len(rows)] = U[rows], V[rows], 1
                if ENGINE == "tensorflow":
                    gradients = gradient_of(model, value)(x, y, w)
                    optimizer.apply(gradients, model.trainable_variables)
                else:
                    step_with_statistics(model, optimizer, value, (x, y, w))
    told = "The rows that fill up the batches of updates 5, 10 count in the statistics of the batch"
    assert report.first_line.startswith(told if has_norm else "Nothing found in 10 updates"), str(report)


def step_with_statistics(model, optimizer, value, batch):
    """Make a step of JAX with the new moving statistics."""
    import jax

    def loss(weights, others, x, *rows):
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return value(outputs, *rows), others

    values = [[v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    gradients, others = jax.grad(loss, has_aux=True)(*values, *batch)
    optimizer.apply(gradients, model.trainable_variables)
    for variable, new in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(new)


# ---- masks that a model makes ----

LENGTHS_OF_64 = RNG.integers(2, 9, 64)
MASK_OF_64 = (np.arange(8)[None] < LENGTHS_OF_64[:, None]).astype("float32")
TOKENS_OF_64 = (RNG.integers(1, 12, (64, 8)) * MASK_OF_64).astype("int32")
TAGS_OF_64 = ((TOKENS_OF_64 * 5 + 3) % 11 * MASK_OF_64).astype("int32")
LATER = (np.arange(8)[None] < LENGTHS_OF_64[:, None] + 1).astype("float32")
EARLIER = (np.arange(8)[None] < LENGTHS_OF_64[:, None] - 1).astype("float32")


def tagger():
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(12, 6, mask_zero=True)
    return keras.Sequential([keras.Input((8,), dtype="int32"), embedding, keras.layers.Dense(12)])


def entropy(out, y, smoothing=0.0):
    hot = keras.ops.one_hot(y, 12) * (1 - smoothing) + smoothing / 12
    return -keras.ops.sum(hot * keras.ops.log_softmax(out), axis=-1)


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    ("mask", "smoothing", "name", "words"),
    [
        (MASK_OF_64, 0.0, "", "Nothing found in 16 updates"),
        (np.ones_like(MASK_OF_64), 0.0, "mask ignored", "Mask ignored. The mask is left out."),
        (MASK_OF_64, 0.1, "other labels", "smoothed by 0.1 instead of 0"),
        (LATER, 0.0, "not known", "places of weight 0, the first one after the end of each row."),
        (EARLIER, 0.0, "not known", "places that have a weight, the last one of each row."),
    ],
)
def test_the_loss_behind_a_mask_of_the_model_is_solved_for(mask, smoothing, name, words, has_weights):
    model = tagger()
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight" if has_weights else "sum_over_batch_size"
    )
    model.compile(optimizer := keras.optimizers.SGD(0.1), loss)
    optimizer.build(model.trainable_variables)

    def value(out, y, w):
        return keras.ops.sum(entropy(out, y, smoothing) * w) / keras.ops.sum(w)

    move = lambda variables, gradients: optimizer.apply([*map(keras.ops.array, gradients)], variables)  # noqa: E731
    with stepcheck.watch(
        model, (TOKENS_OF_64, TAGS_OF_64, MASK_OF_64) if has_weights else (TOKENS_OF_64, TAGS_OF_64)
    ) as report:
        train(model, value, (TOKENS_OF_64, TAGS_OF_64, mask), 8, move)
    assert [cause.name for cause in report.causes] == [name] * bool(name), str(report)
    assert words in report.first_line, report.first_line


# ---- optimizers ----


@pytest.mark.parametrize("fault", ["", "times 3", "of the other"])
@pytest.mark.parametrize("is_first", [True, False])
def test_two_optimizers_of_other_variables_make_one_update(is_first, fault):
    model = network()
    own = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)
    parts = [layer.trainable_variables for layer in model.layers]
    for optimizer, variables in zip(own, parts, strict=True):
        optimizer.build(variables)

    def move(variables, gradients):
        head, body = gradients[2:], [3 * g for g in gradients[:2]] if fault == "times 3" else gradients[:2]
        steps = [(own[0], body, parts[0]), (own[1], head, parts[1])]
        for optimizer, grads, held in steps if is_first else steps[::-1]:
            optimizer.apply([*map(keras.ops.array, grads)], held)

    x = RNG.normal(size=(60, 5)).astype("float32")
    loss = "mae" if fault == "of the other" else "mse"
    with stepcheck.watch(model, (x, x.sum(1)), loss=loss) as report:
        train(model, square, (x, x.sum(1)), 12, move)
    assert "10 updates" in str(report)
    assert report.first_line.startswith("Nothing found in 10 updates:") != bool(fault), str(report)
    assert ("counts 3 times what it should" in report.first_line) == (fault == "times 3")


@pytest.mark.skipif(ENGINE != "tensorflow", reason="clips of TensorFlow, in a function")
@pytest.mark.parametrize("clips", [{"clipnorm": 0.5}, {"clipvalue": 0.01}, {"global_clipnorm": 0.5}])
def test_the_clips_of_an_optimizer_are_not_those_of_the_loop(clips):
    import tensorflow as tf

    model = network()
    model.compile(optimizer := keras.optimizers.Adam(0.01, **clips), "mse")
    sums = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y[:, None]) ** 2)
        for total, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            total.assign(gradient)
        optimizer.apply(list(sums), model.trainable_variables)

    rng = np.random.default_rng(1)
    with stepcheck.watch(model, (U, V)) as report:
        for _ in range(2):
            for rows in np.split(rng.permutation(96), 8):
                step(tf.constant(U[rows]), tf.constant(V[rows]))
    assert report.first_line.startswith("Nothing found in 16 updates"), str(report)
    assert report.notes == []


def test_one_optimizer_that_is_called_for_each_part_counts_too_fast():
    model = network()
    model.compile(optimizer := keras.optimizers.Adam(0.01), "mse")
    optimizer.build(model.trainable_variables)

    def move(variables, gradients):
        for part in (slice(0, 2), slice(2, 4)):
            optimizer.apply([*map(keras.ops.array, gradients[part])], variables[part])

    with stepcheck.watch(model, (U, V)) as report:
        train(model, square, (U, V), 12, move)
    assert report.first_line.startswith("One optimizer is called several times in an update"), str(report)


def test_a_clip_by_the_squared_norm_is_no_clip_that_is_forgotten():
    model = network()

    def move(variables, gradients):
        factor = min(1.0, 1 / float(sum(np.sum(np.square(g)) for g in gradients)))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(variable - 0.05 * factor * gradient)

    with stepcheck.watch(
        model, (U, V), loss="mse", optimizer=keras.optimizers.SGD(0.05, global_clipnorm=1.0)
    ) as report:
        train(model, square, (U, V), 12, move)
    assert [cause.name for cause in report.causes] == ["clipped otherwise"], str(report)


@pytest.mark.parametrize(
    ("own", "meant", "words"),
    [
        (keras.optimizers.SGD, {}, "The optimizer of the loop is SGD, and Adam was meant."),
        (keras.optimizers.Adam, {"beta_1": 0.1}, "The Adam of the loop has beta_1=0.1, and beta_1=0.9 was meant."),
        (
            keras.optimizers.Adam,
            {"learning_rate": 0.1},
            "The Adam of the loop has learning_rate=0.1, and learning_rate=0.01 was meant.",
        ),
        (keras.optimizers.AdamW, {}, "The AdamW of the loop has weight_decay=0.004, and weight_decay=None was meant."),
        (keras.optimizers.Adam, {"name": "mine", "clipnorm": None}, "Nothing found in 16 updates"),
    ],
)
def test_another_optimizer_than_the_stated_one_is_said(own, meant, words):
    model, optimizer = network(), own(**({"learning_rate": 0.01} | meant))
    optimizer.build(model.trainable_variables)

    with stepcheck.watch(model, (U, V), loss="mse", optimizer=keras.optimizers.Adam(0.01)) as report:
        train(model, square, (U, V), 12, lambda variables, gradients: optimizer.apply(gradients, variables), 2)

    assert report.first_line.startswith(words), str(report)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {"beta_1": 0.1},
            "The AdamW of the loop has beta_1=0.1, and the compiled AdamW has beta_1=0.9. Is that meant?",
        ),
        ({"bare": ["bias"]}, "has decayed variables=2, and the compiled AdamW has decayed variables=4. Is that meant?"),
        ({"learning_rate": 0.1}, ""),
    ],
)
def test_another_optimizer_than_the_compiled_one_is_a_note(own, words):
    model, bare = network(), own.pop("bare", [])
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    optimizer = keras.optimizers.AdamW(**({"learning_rate": 0.01} | own))
    optimizer.exclude_from_weight_decay(var_names=bare)
    optimizer.build(model.trainable_variables)

    with stepcheck.watch(model, (U, V)) as report:
        train(model, square, (U, V), 12, lambda variables, gradients: optimizer.apply(gradients, variables), 2)

    assert report.first_line.startswith("Nothing found in 16 updates"), str(report)
    told = [note for note in report.notes if "of the loop has" in note]
    assert len(told) == bool(words), report.notes
    assert all(words in note for note in told)


@pytest.mark.parametrize(
    ("momentum", "falls", "meant", "words"),
    [
        (0.9, False, keras.optimizers.SGD(0.01, momentum=0.9), "Nothing found in "),
        (0.9, True, keras.optimizers.SGD(0.01, momentum=0.9), "Nothing found in "),
        (
            0.9,
            True,
            keras.optimizers.SGD(0.01, momentum=0.5),
            "The steps have momentum=0.9, and momentum=0.5 was meant.",
        ),
        (
            0.0,
            False,
            keras.optimizers.SGD(0.01, momentum=0.9),
            "The steps have momentum=0, and momentum=0.9 was meant.",
        ),
        (
            0.9,
            False,
            keras.optimizers.SGD(0.01, momentum=0.5),
            "The steps have momentum=0.9, and momentum=0.5 was meant.",
        ),
        (0.9, False, keras.optimizers.Adam(0.01), "The steps are those of SGD, and Adam was meant."),
    ],
)
def test_a_momentum_by_hand_is_compared_with_that_of_the_stated_optimizer(momentum, falls, meant, words):
    model, kept, rates = network(), {}, iter(np.geomspace(0.01, 0.002 if falls else 0.01, 16))

    def move(variables, gradients):
        rate = next(rates)
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            kept[i] = momentum * kept.get(i, 0) + gradient
            variable.assign(variable - rate * kept[i])

    how = {"learning_rate": lambda number: np.geomspace(0.01, 0.002, 16)[number]} if falls else {}
    with stepcheck.watch(model, (U, V), loss="mse", optimizer=meant, **how) as report:
        train(model, square, (U, V), 12, move)
    assert report.first_line.startswith(words), str(report)


@pytest.mark.parametrize(
    ("meant", "words"),
    [
        (keras.optimizers.Adam(0.01), "Nothing found in "),
        (
            keras.optimizers.Adam(0.01, beta_1=0.8),
            "The steps have beta_1=0.9, beta_2=0.999, and beta_1=0.8, beta_2=0.999",
        ),
        (keras.optimizers.SGD(0.01), "The steps are those of Adam, and SGD was meant."),
    ],
)
def test_an_adam_by_hand_is_compared_with_the_stated_optimizer(meant, words):
    model = network()
    with stepcheck.watch(model, (U, V), loss="mse", optimizer=meant) as report:
        train(model, square, (U, V), 12, by_adam(0.01, 0.0))
    assert report.first_line.startswith(words), str(report)


def test_gradients_that_are_all_zero_are_said_without_a_loss():
    model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse")

    with stepcheck.watch(model, (U, V)) as report:
        zero = [np.zeros(v.shape, "float32") for v in model.trainable_variables]
        train(model, square, (U, V), 12, lambda variables, _: model.optimizer.apply(zero, variables))

    assert report.has_likely
    assert "The gradient is 0 in all 16 updates, for every variable: nothing is trained." in str(report)


@pytest.mark.parametrize(
    ("is_masked", "words"), [(True, "Nothing found in "), (False, "Mask ignored. The mask is left out.")]
)
def test_a_loss_with_its_own_weights_is_solved_for_behind_a_mask(is_masked, words):
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 9, (48, 5)) * (np.arange(5) < draw.integers(2, 6, (48, 1)))
    tokens[:, 0] = np.arange(48) % 8 + 1
    following = np.concatenate([tokens[:, 1:], np.zeros((48, 1), int)], axis=1)
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, keras.layers.Dense(9)])
    model.compile(keras.optimizers.Adam(0.01))

    def meant(y, logits):
        values = keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return values, keras.ops.cast(keras.ops.not_equal(y, 0), "float32")

    def value(logits, y):
        values, weights = meant(y, logits)
        weights = weights if is_masked else 0 * weights + 1
        return keras.ops.sum(values * weights) / keras.ops.sum(weights)

    with stepcheck.watch(model, (tokens, following), loss=meant) as report:
        train(model, value, (tokens, following), 8, lambda variables, grads: model.optimizer.apply(grads, variables))

    assert report.first_line.startswith(words), str(report)


def test_the_nearest_row_is_shown_where_it_differs():
    rows = np.arange(60.0, dtype="float32").reshape(6, 10)
    given = rows.copy()
    given[:, 8] += 0.5

    told = beside(Rows(rows), [Piece(Called(0, [given], [], [], [], None, None), np.full(6, -1))])

    assert told.endswith("is (0, 1, 2, 3, ...), but for 8.5 and 8 at place 8 of the row")


def test_padded_places_by_which_a_step_by_hand_divides_are_known_by_the_stated_rate():
    draw = np.random.default_rng(0)
    mask = (np.arange(6) < draw.integers(1, 7, (48, 1))).astype("float32")
    tokens = draw.integers(1, 9, (48, 6)) * mask.astype(int)
    tags = tokens % 4
    keras.utils.set_random_seed(0)
    layers = keras.layers.Embedding(9, 4), keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    meant = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")

    def over_all_places(logits, y, there):
        return keras.ops.mean(keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True) * there)

    stated = {"loss": meant, "optimizer": keras.optimizers.SGD(0.3)}
    with stepcheck.watch(model, (tokens, tags, mask), **stated) as report:
        train(model, over_all_places, (tokens, tags, mask), 8, descend(0.3))

    assert [cause.name for cause in report.causes] == ["padded places counted"], str(report)


def by_lion(rate):
    """Return the steps of an optimizer that is not solved for: of the signs of a mean of gradients."""
    means = {}

    def move(variables, gradients):
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            gradient = keras.ops.convert_to_numpy(gradient)
            mean = means.get(i, 0 * gradient)
            variable.assign(variable - rate * np.sign(0.9 * mean + 0.1 * gradient))
            means[i] = 0.99 * mean + 0.01 * gradient

    return move


@pytest.mark.parametrize(
    ("value", "causes", "words"),
    [
        (square, [], "Not judged: the optimizer step is your own."),
        (lambda out, y: 12 * square(out, y), [], "Not judged: the optimizer step is your own."),
        (lambda out, y: keras.ops.mean((out - y) ** 2), ["broadcast"], "Broadcast. Each output meets"),
        (lambda out, y: square(out, keras.ops.roll(y, 1)), ["labels shifted"], "Labels shifted. The labels are those"),
    ],
)
def test_the_loss_is_judged_behind_an_optimizer_that_is_not_known(value, causes, words):
    model = network()

    with stepcheck.watch(model, (U, V), loss="mse") as report:
        train(model, value, (U, V), 12, by_lion(0.003))

    assert [cause.name for cause in report.causes] == causes, str(report)
    assert report.first_line.startswith(words), str(report)


def test_steps_by_hand_with_the_clip_of_the_stated_optimizer_are_judged():
    model, means, squares = network(), {}, {}

    def move(variables, gradients):
        gradients = [keras.ops.convert_to_numpy(g) for g in gradients]
        factor = min(1.0, 0.5 / np.sqrt(sum(np.sum(g**2) for g in gradients)))
        number = len(means.setdefault("numbers", []))
        means["numbers"].append(number)
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            means[i] = 0.9 * means.get(i, 0) + 0.1 * factor * gradient
            squares[i] = 0.999 * squares.get(i, 0) + 0.001 * (factor * gradient) ** 2
            ratio = np.sqrt(1 - 0.999 ** (number + 1)) / (1 - 0.9 ** (number + 1))
            variable.assign(variable - 0.01 * ratio * means[i] / (np.sqrt(squares[i]) + 1e-7))

    stated = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    with stepcheck.watch(model, (U, V), loss="mse", optimizer=stated) as report:
        train(model, square, (U, V), 12, move)

    assert report.first_line.startswith("Nothing found in 15 updates: rows, mode, gradient, step"), str(report)


def by_warm_up(rates, momentum=0.9):
    """Return steps with momentum, whose rate is one of these in each update."""
    moves, numbers = {}, iter(rates)

    def move(variables, gradients):
        rate = next(numbers)
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            moves[i] = momentum * moves.get(i, 0.0) - rate * keras.ops.convert_to_numpy(gradient)
            variable.assign(variable + moves[i])

    return move


def warm(number):
    return 0.002 * min(int(number), 5)


def test_steps_by_hand_whose_rate_begins_at_0_are_judged_by_the_stated_schedule():
    model = network()

    with stepcheck.watch(model, (U, V), loss="mse", learning_rate=warm) as report:
        train(model, square, (U, V), 12, by_warm_up(map(warm, range(40))))

    assert report.first_line.startswith("Nothing found in "), str(report)
    assert report.is_judged, str(report)


def test_a_penalty_that_steps_by_hand_forget_is_found():
    model = network()
    model.trainable_variables[0].regularizer = keras.regularizers.L2(0.1)

    with stepcheck.watch(model, (U, V), loss="mse", optimizer=keras.optimizers.SGD(0.01, momentum=0.9)) as report:
        train(model, square, (U, V), 12, by_warm_up([0.01] * 40))

    assert [cause.name for cause in report.causes] == ["penalty forgotten"], str(report)


@pytest.mark.skipif(ENGINE != "jax", reason="the weights are held outside of the model")
def test_gradients_at_an_average_of_the_weights_are_said_first():
    import jax

    model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)

    def loss(weights, x, y):
        return square(model.stateless_call(weights, [], x, training=True)[0], y)

    def train_at_average():
        weights, slots = ([v.value for v in group] for group in (model.trainable_variables, model.optimizer.variables))
        average, rng = weights, np.random.default_rng(0)
        for rows in [part for _ in range(2) for part in np.split(rng.permutation(len(U)), 8)]:
            weights, slots = model.optimizer.stateless_apply(slots, jax.grad(loss)(average, U[rows], V[rows]), weights)
            average = [0.9 * a + 0.1 * w for a, w in zip(average, weights, strict=True)]

    with stepcheck.watch(model, (U, V)) as report:
        train_at_average()
    assert report.first_line.startswith("The gradients of updates 2, 3, 4, 5, 6, 7, ... are taken at other weights"), (
        report
    )


def by_adam(rate, decay):
    """Return the steps of AdamW."""
    means, squares, count = {}, {}, [0]

    def move(variables, gradients):
        count[0] += 1
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            gradient = keras.ops.convert_to_numpy(gradient)
            means[i] = 0.9 * means.get(i, 0.0) + 0.1 * gradient
            squares[i] = 0.999 * squares.get(i, 0.0) + 0.001 * gradient**2
            mean, square_of = means[i] / (1 - 0.9 ** count[0]), squares[i] / (1 - 0.999 ** count[0])
            variable.assign(variable * (1 - rate * decay) - rate * mean / (np.sqrt(square_of) + 1e-7))

    return move


@pytest.mark.parametrize(
    ("own", "meant", "words"),
    [
        (0.5, 0.5, "Nothing found in "),
        (0.01, 0.01, "Nothing found in "),
        (0.003, 0.003, "Nothing found in "),
        (0.0, 0.5, "The weights do not decay, and weight_decay=0.5 was meant."),
        (0.5, 0.0, "The weights decay by 0.5 times the rate, and weight_decay=0 was meant."),
        (0.5, 1.5, "The weights decay by 0.5 times the rate, and weight_decay=1.5 was meant."),
    ],
)
def test_a_decay_by_hand_is_compared_with_that_of_the_stated_optimizer(own, meant, words):
    model, optimizer = network(), keras.optimizers.AdamW(0.01, weight_decay=meant)

    with stepcheck.watch(model, (U, V), loss="mse", optimizer=optimizer) as report:
        train(model, square, (U, V), 12, by_adam(0.01, own))

    assert report.first_line.startswith(words), str(report)


@pytest.mark.parametrize(
    ("weight", "labels", "cause"),
    [(0.3, V, ""), (1.0, V, "loss weights ignored"), (0.3, V[::-1].copy(), "labels of other rows")],
)
def test_losses_of_several_outputs_are_solved_for_under_an_optimizer_by_hand(weight, labels, cause):
    keras.utils.set_random_seed(0)
    x = keras.Input((5,))
    inner = keras.layers.Dense(8, "tanh")(x)
    model = keras.Model(x, [keras.layers.Dense(1, name=name)(inner) for name in "ab"])

    def value(outputs, one, two):
        return square(outputs[0], one) + weight * square(outputs[1], two)

    model.compile(keras.optimizers.Adam(0.01), ["mse", "mse"], loss_weights=[1.0, 0.3])
    with stepcheck.watch(model, (U, [V[:, None], V[:, None]])) as report:
        train(model, value, (U, V, labels), 12, by_adam(0.01, 0.0))
    assert [each.name for each in report.causes] == [cause] * bool(cause), str(report)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_divisor_is_solved_for_under_an_optimizer_by_hand(is_right):
    model, weights = network(), np.linspace(0.2, 2, len(U)).astype("float32")

    def value(outputs, labels, own):
        total = keras.ops.sum(own[:, None] * (outputs - labels[:, None]) ** 2)
        return total / (len(labels) if is_right else keras.ops.sum(own))

    with stepcheck.watch(model, (U, V, weights), loss="mse", optimizer=keras.optimizers.Adam(0.01)) as report:
        train(model, value, (U, V, weights), 12, by_adam(0.01, 0.0))
    assert [each.name for each in report.causes] == ["divided by the weights"] * (not is_right), str(report)
    assert report.is_judged


@pytest.mark.parametrize("others", [{"sample_weight": np.linspace(0.5, 1.5, len(U))}, {}])
def test_a_fit_with_other_weights_of_rows_ends_the_audit(others):
    model = network()
    model.compile("sgd", "mse")
    weights = np.ones(len(U))
    with stepcheck.watch(model, (U, V)) as report:
        model.predict(U, verbose=0)
        model(U[:2])
        model.fit(U, V, batch_size=8, sample_weight=weights, verbose=0)
        weights += others.get("sample_weight", 0)  # in place
        model.fit(U, V, batch_size=8, sample_weight=weights, verbose=0)
    assert (not report.causes, report.is_judged) == (True, True), str(report)
    assert ("`fit` is called again, with other weights of rows" in str(report)) == bool(others)


@pytest.mark.skipif(ENGINE != "jax", reason="a jitted pass does not show that no gradient is taken")
@pytest.mark.parametrize("is_training", [True, False])
def test_evaluations_in_a_jitted_function_that_move_statistics_are_said_first(is_training):
    import jax

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    def value(weights, others, x, y, training=True):
        outputs, others = model.stateless_call(weights, others, x, training=training)
        return square(outputs, y), others

    @jax.jit
    def step(weights, others, x, y):
        gradients, others = jax.grad(value, has_aux=True)(weights, others, x, y)
        return [w - 0.05 * g for w, g in zip(weights, gradients, strict=True)], others

    evaluate = jax.jit(lambda weights, others, x, y: value(weights, others, x, y, is_training))

    def train_and_evaluate():
        weights, others = ([v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables))
        rng = np.random.default_rng(0)
        for _ in range(3):
            for rows in np.split(rng.permutation(72), 6):
                weights, others = step(weights, others, U[rows], V[rows])
            _, others = evaluate(weights, others, U[72:], V[72:])

    with stepcheck.watch(model, (U[:72], V[:72]), loss="mse") as report:
        train_and_evaluate()
    words = "A forward pass without a gradient ran in training mode" if is_training else "Nothing found in "
    assert report.first_line.startswith(words), str(report)


@pytest.mark.skipif(ENGINE != "tensorflow", reason="a tape of which no gradient is taken")
def test_the_last_evaluation_under_a_tape_is_none_of_the_rows_that_are_trained_on():
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y, is_trained):
        with tf.GradientTape() as tape:
            loss = square(model(x, training=True), y)
        if is_trained:
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    with stepcheck.watch(model, (U[:72], V[:72]), loss="mse") as report:
        for epoch in range(3):
            for rows in np.split(np.random.default_rng(epoch).permutation(72), 6):
                step(U[rows], V[rows], True)
            step(U[72:], V[72:], False)
    assert report.first_line.startswith("A forward pass without a gradient ran in training mode"), str(report)


def test_labels_with_noise_under_an_absolute_error_are_none_of_other_rows():
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(3)

    def absolute(out, y):
        return keras.ops.mean(keras.ops.abs(out - (y + np.float32(rng.uniform(-1, 1, len(y))))[:, None]))

    with stepcheck.watch(model, (U, V), loss="mae") as report:
        train(model, absolute, (U, V), 12, lambda variables, gradients: optimizer.apply(gradients, variables))
    assert "labels of other rows" not in [cause.name for cause in report.causes], str(report)


@pytest.mark.skipif(ENGINE != "tensorflow", reason="gradients of two losses by two tapes")
def test_two_optimizers_on_one_batch_apply_no_stale_gradients():
    import tensorflow as tf

    model, optimizers = network(), [keras.optimizers.Adam(0.01) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, (U, V), loss="mse") as report:
        for epoch in range(2):
            for rows in np.split(np.random.default_rng(epoch).permutation(len(U)), 8):
                with tf.GradientTape(persistent=True) as tape:
                    losses = [square(model(U[part], training=True), V[part]) for part in np.split(rows, 2)]
                grads = [tape.gradient(loss, model.trainable_variables) for loss in losses]
                for optimizer, own in zip(optimizers, grads, strict=True):
                    optimizer.apply(own)
    assert "stale" not in str(report), str(report)


@pytest.mark.parametrize(("factor", "is_told"), [(1 / 3, True), (0.7, False), (1.0, False)])
def test_a_printed_loss_that_is_a_share_of_the_mean_is_said(factor, is_told):
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    gradient, numbers = gradient_of(model, square), []
    with stepcheck.watch(model, (ROWS, LABELS), loss="mse") as report:
        for epoch in range(2):
            losses = []
            for rows in np.split(np.random.default_rng(epoch).permutation(60), 5):
                sums = [0.0] * 4
                for part in np.split(rows, 3):
                    losses.append(float(square(model.predict_on_batch(ROWS[part]), LABELS[part])))
                    sums = [
                        a + np.asarray(g) / 3 for a, g in zip(sums, gradient(ROWS[part], LABELS[part]), strict=True)
                    ]
                optimizer.apply([*map(keras.ops.array, sums)], model.trainable_variables)
            numbers.append(factor * np.mean(losses))
    report.printed(loss=numbers)
    told = "The printed loss is 0.3333 times the mean of the rows, or of the batches. An update has 3 forward passes"
    assert report.first_line.startswith(told) == is_told, str(report)
    assert report.causes == []


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels_of_the_batch_before_are_those_of_other_rows(num_classes):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(num_classes)])
    optimizer, before = keras.optimizers.Adam(0.01), []
    optimizer.build(model.trainable_variables)
    labels = np.argmax(U[:, :num_classes], 1)

    def with_those_before(out, y):
        before.append(y)
        own = before[-2:][0]  # the first batch has its own
        return keras.ops.mean(keras.ops.sparse_categorical_crossentropy(own, out, from_logits=True))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with stepcheck.watch(model, (U, labels), loss=loss) as report:
        train(model, with_those_before, (U, labels), 12, lambda variables, grads: optimizer.apply(grads, variables))
    assert [cause.name for cause in report.causes] == ["labels of other rows"], str(report)


@pytest.mark.parametrize(
    ("weight", "is_of_all", "causes"),
    [(0.0, False, []), (0.0, True, ["padding counted"]), (1.0, False, ["rows twice in a pass"])],
)
def test_rows_without_weight_that_fill_up_the_last_batch_hide_no_other_fault(weight, is_of_all, causes):
    model, optimizer, num = network(), keras.optimizers.SGD(0.01), 90
    optimizer.build(model.trainable_variables)

    def value(out, y, w):
        return keras.ops.sum(w * (out[:, 0] - y) ** 2) / (20 if is_of_all else keras.ops.sum(w))

    gradient = gradient_of(model, value)
    with stepcheck.watch(model, (U[:num], V[:num]), loss="mse") as report:
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(num)
            for start in range(0, num, 20):
                rows, weights = np.resize(order[start : start + 20], 20), np.ones(20, "float32")
                if start + 20 > num:
                    rows[num - start :], weights[num - start :] = order[: start + 20 - num], weight
                optimizer.apply([*map(keras.ops.array, gradient(U[rows], V[rows], weights))], model.trainable_variables)
    assert [cause.name for cause in report.causes] == causes, str(report)


def test_noise_that_a_trace_draws_is_said_first():
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    weights = model.trainable_variables
    if ENGINE == "tensorflow":
        import tensorflow as tf

        @tf.function
        def gradient(x, y):
            x = x + np.random.normal(size=(12, 5)).astype("float32")
            with tf.GradientTape() as tape:
                loss = square(model(x, training=True), y)
            return tape.gradient(loss, weights)
    else:
        import jax

        @jax.jit
        @jax.grad
        def value(weights, x, y):
            x = x + np.random.normal(size=(12, 5)).astype("float32")
            return square(model.stateless_call(weights, [], x, training=True)[0], y)

        def gradient(x, y):
            return value([v.value for v in weights], x, y)

    with stepcheck.watch(model, (U, V), loss="mse") as report:
        for rows in np.split(np.random.default_rng(0).permutation(96), 8):
            optimizer.apply([*map(keras.ops.array, gradient(U[rows], V[rows]))], weights)
    assert report.first_line.startswith("`np.random.normal` in "), str(report)


@pytest.mark.skipif(ENGINE != "tensorflow", reason="JAX has numbers of 64 bits only if it is set so at its beginning")
@pytest.mark.parametrize("causes", [[], ["broadcast"]])
def test_loops_in_float64_are_judged(causes, request):
    request.addfinalizer(lambda: keras.config.set_floatx("float32"))
    keras.config.set_floatx("float64")
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    x, y = U.astype("float64"), V.astype("float64")
    value = (lambda out, y: keras.ops.mean((out - y) ** 2)) if causes else square
    with stepcheck.watch(model, (x, y), loss="mse") as report:
        train(model, value, (x, y), 12, lambda variables, gradients: optimizer.apply(gradients, variables))
    assert [cause.name for cause in report.causes] == causes, str(report)
    assert "gradient" in report.as_json()["judged"]
