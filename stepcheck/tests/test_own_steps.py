"""Loops by hand: beside `fit`, with an optimizer of the script, and with a loss that has to be supposed."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import stepcheck
from stepcheck.keras.chain import averages, divergence
from stepcheck.report.found import Likely
from stepcheck.solve.optimizers import Moves, solved
from stepcheck.stages.steps import anew_in_each_pass, apply
from stepcheck.trace.log import Applied, Called, Log
from stepcheck.trace.rows import mixed
from stepcheck.trace.windows import Piece, Update, Windows

ENGINE = keras.backend.backend()
PIECE = Piece(None, np.arange(3))  # type: ignore[arg-type]


LOOP = "for epoch in range(2):"
OF_OTHER = "other = network()\nother.compile('adam', 'mse')\nother.fit(x, y, epochs=9, batch_size=4, verbose=0)\n"
OF_ITSELF = "model.fit(x[:16], y[:16], epochs=9, batch_size=4, verbose=0)\n"


BETAS = {"other beta": (0.9, 0.9), "swapped": (0.99, 0.9), "one alone": (0.9, 0.0), "none": (0.0, 0.0)}


def fall(kind, grads, params):
    """Return the falls of the weights by an optimizer, at rates of 0.1, or rising ones."""
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for t, (g, p) in enumerate(zip(grads, params, strict=True), start=1):
        rate = 0.1 * t if "rising" in kind else 0.1
        if "Keras" in kind:
            first = 0.9 * first + rate * g
            yield 0.9 * first + rate * g
            continue
        if kind == "decay of plain steps":
            yield rate * g + p * KERNELS * DECAYS[kind]
            continue
        if kind == "momentum" or "nesterov" in kind:
            first = 0.9 * first + g
            yield rate * (first if kind == "momentum" else g + 0.9 * first)
            continue
        count = 1 if kind == "a frozen count" else t + (kind == "next count")
        one, two = BETAS.get(kind, (0.9, 0.99))
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        step = first / (1 - one**count) / (np.sqrt(second / (1 - two**count)) + 1e-8)
        yield rate * step + p * KERNELS * DECAYS.get(kind, 0.0) * (rate if "by rate" in kind else 1)


KERNELS = np.arange(90) < 80
DECAYS = {
    "decay by rate": 0.05,
    "rising decay by rate": 0.05,
    "rising decay": 0.005,
    "decay": 0.2,
    "decay of plain steps": 0.0222,
}
MOMENTS = "mean with 0.9, over the root of its mean square with 0.99)"


@pytest.mark.parametrize(
    ("kind", "told", "note"),
    [
        ("momentum", "0.9 times the move before", ""),
        ("nesterov", "0.9 times the move before", ""),
        ("rising nesterov", "times the move before", ""),
        ("rising nesterov of Keras", "0.9 times the move before", ""),
        ("adam", MOMENTS, ""),
        ("rising", MOMENTS, ""),
        ("decay by rate", f"{MOMENTS}, and shrinks the weights by 0.005, 0.05 times the rate", ""),
        ("rising decay by rate", "by 0.05 times the rate", ""),
        ("rising decay", "by 0.005, at any rate", ""),
        ("decay", "by 0.2, 2 times the rate", "forget all but the last 5 updates"),
        ("decay of plain steps", "and shrinks the weights by 0.0222", ""),
        ("a frozen count", "mean with 0.9", "does the count of updates move?"),
        ("none", "mean with 0.9", "does the count of updates move?"),
        ("other beta", MOMENTS, "mean square is divided by 1 - 0.9 ** count, and not divided by 1 - 0.99 ** count."),
        (
            "swapped",
            MOMENTS,
            "the mean is divided by 1 - 0.99 ** count, and not divided by 1 - 0.9 ** count; the mean sq",
        ),
        ("one alone", MOMENTS, "the mean square is not corrected, and not divided by 1 - 0.99 ** count."),
        ("next count", MOMENTS, "as in Adam: the count is that of the next update."),
    ],
)
def test_an_optimizer_by_hand_is_solved_for(kind, told, note):
    rng = np.random.default_rng(0)
    grads, params = (list(rng.normal(size=(6, 90))) for _ in range(2))
    moves = Moves(params, list(fall(kind, grads, params)), grads, [1e-3] * 6, KERNELS)
    rule = solved(moves)
    assert rule is not None
    assert (told in rule.told, note in "".join(rule.notes), len(rule.notes)) == (True, True, int(bool(note)))
    assert ("before" in rule.told, "0.222 times" in rule.told) == ("momentum" in kind or "nesterov" in kind, False)
    assert rule.rates == pytest.approx([0.1 * t if "rising" in kind else 0.1 for t in range(1, 7)], rel=1e-3)
    assert solved(moves._replace(grads=list(rng.normal(size=(6, 90))))) is None


def test_a_decay_of_the_wrong_sign_is_said():
    rng = np.random.default_rng(0)
    grads, params = (list(rng.normal(size=(6, 90))) for _ in range(2))
    falls = [fall - 0.01 * p * KERNELS for fall, p in zip(fall("adam", grads, params), params, strict=True)]
    rule = solved(Moves(params, falls, grads, [1e-4] * 6, KERNELS))
    (note,) = rule.notes
    assert isinstance(note, Likely)
    assert note.startswith("Each update makes the weights grow by the share 0.01, beside its step.")


@pytest.mark.parametrize(
    ("kind", "near", "own", "is_known"),
    [("decay by rate", 1e-4, 0.05, True), ("decay by rate", 0.1, 0.0, False), ("adam", 0.1, 0.0, True)],
)
def test_a_decay_that_does_not_show_in_each_update_is_neither_found_nor_excluded(kind, near, own, is_known):
    rng = np.random.default_rng(0)
    grads, params = (list(rng.normal(size=(6, 90))) for _ in range(2))
    rule = solved(Moves(params, list(fall(kind, grads, params)), grads, [1e-4] * 5 + [near], KERNELS))
    assert rule.decay[0] == pytest.approx(own, rel=1e-3)
    assert np.isfinite(rule.decay[1]) == is_known


WARM, FALLING = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("rates", "sizes", "told", "is_likely"),
    [
        (WARM * 2, [3] * 8, "begins anew with each pass", True),
        (FALLING * 2, [3] * 8, "begins anew with each pass", False),  # a warm restart
        ([0.1, 0.4, 0.2, 0.1] * 2, [3] * 8, "begins anew with each pass", False),  # a triangle
        ([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4], [3] * 8, "", False),
        ([0.1, 0.1, 0.5, 0.5] * 2, [3, 3, 2, 2] * 2, "on the number of rows of a batch alone: 0.1 for 3 rows", True),
        ([0.1] * 4 + [0.5] * 4, [3] * 4 + [2] * 4, "", False),  # another stage
        ([0.3, 0.3, 0.2, 0.2] * 2, [3, 3, 2, 2] * 2, "begins anew with each pass", False),  # scaled by the rows
    ],
)
def test_rates_that_begin_anew_or_depend_on_a_batch_are_said(rates, sizes, told, is_likely):
    updates, place = [], {}
    for i, (rate, size) in enumerate(zip(rates, sizes, strict=True)):
        piece = Piece(SimpleNamespace(order=i), np.arange(size))  # type: ignore[arg-type]
        updates.append(Update(i, [piece], Applied(i, 0, [], [], [], [], [], rate, i, None)))
        place[i] = i // 4, 0
    seen = Windows([], updates, [], 0, set(), 0, place)
    found = list(anew_in_each_pass(seen))
    assert (len(found), told in "".join(found)) == (bool(told), True), found
    assert [isinstance(note, Likely) for note in found] == [is_likely] * bool(told)


def test_optimizers_that_move_the_same_variables_in_turn_begin_nothing_anew():
    grads, slots = [np.ones(3, "float32")], [[np.full(1, float(i // 2))] for i in range(8)]
    steps = [Applied(i, i % 2, grads, grads, slots[i], grads, slots[i + 2], 0.1, i // 2, None) for i in range(6)]
    updates = [Update(i, [PIECE], step) for i, step in enumerate(steps, start=1)]
    assert list(apply(updates, None)) == ["2 optimizers move the same variables in turn. Is that meant?"]


CUT = [("def value(model, a, b):", "def value(model, a, b):\n    a, b = a[:, :-1], a[:, 1:]"), ("a > 0", "b > 0")]


BY_KERAS = [
    ("keras.ops.mean((first - b[0]) ** 2)", "keras.losses.MeanSquaredError()(b[0], first)"),
    (
        "keras.ops.mean(keras.ops.sparse_categorical_crossentropy(b[1], second, from_logits=True))",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True)(b[1], second)",
    ),
]

WEIGHTS = "OF_AGE, OF_KIND =", "LOSS_WEIGHTS = [1.0, 0.2]\nOF_AGE, OF_KIND ="
NAMED = [
    (
        "[layers.Dense(1)(inner), layers.Dense(2)(inner)])",
        '{"age": layers.Dense(1)(inner), "kind": layers.Dense(2)(inner)})',
    ),
    ("first, second = model(a, training=True)", 'first, second = map(model(a, training=True).get, ("age", "kind"))'),
    ("OF_AGE, OF_KIND =", 'weights = {"age": 1.0, "kind": 0.2}\nOF_AGE, OF_KIND ='),
]


COMPILED = (
    "OF_AGE, OF_KIND =",
    """ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), ["mse", ce], loss_weights=[0.2, 1.0])
OF_AGE, OF_KIND =""",
)


@pytest.mark.parametrize(("share", "is_said"), [(0.99, True), (0.01, False), (1.0, False), (None, False)])
def test_an_average_of_weights_that_forgets_all_but_the_last_is_said(share, is_said):
    rng = np.random.default_rng(0)
    fast = rng.normal(size=(8, 50)).astype("float32")
    slow, called, steps = fast[0], [], []
    for t, new in enumerate(fast):
        called.append(Called(2 * t, [], [], [], [slow[:20], slow[20:]], False, None))  # of a frozen model
        after = [new[:20], new[20:]]
        steps.append(Applied(2 * t + 1, 0, after, after, [], after, [], 0.1, t, None))
        slow = slow + np.float32(1 / (t + 1) if share is None else share) * (
            new - slow
        )  # a mean of all, or of late ones
    pair = [
        SimpleNamespace(model=SimpleNamespace(name=n), log=Log(called=c, applied=a))
        for n, c, a in (("slow", called, []), ("fast", [], steps))
    ]
    assert sum("forgets all but the last update" in note for note in averages(*pair)) == is_said


@pytest.mark.parametrize(
    ("count", "of_outputs", "said"),
    [
        (1.0, 1.0, ["1 times its sum over 3 dimensions, beside a sum"]),
        (1 / 3, 1.0, ["0.3333 times its sum over 3 dimensions, beside a sum", "counts 1 / 3 of"]),
        (1 / 3, 0.1, ["0.3333 times its sum over 3 dimensions"]),  # both are means
        (4.0, 1.0, ["4 times its sum over 3 dimensions, beside a sum"]),
        (0.0, 1.0, []),
    ],
)
@pytest.mark.parametrize("is_root", [False, True])
def test_the_share_of_a_divergence_is_solved_for(count, of_outputs, said, is_root):
    rng, logs = np.random.default_rng(0), (Log(), Log())
    for t in range(5):
        num = 6 + t
        x, out, mean, log, noise, by_z = (rng.normal(size=(num, k)) for k in (10, 10, 3, 3, 3, 3))
        power = 1.0 if is_root else 0.5
        z = mean + np.exp(power * log) * noise
        by_mean = by_z + count * mean / num
        by_log = by_z * power * (z - mean) + count * power * (np.exp(2 * power * log) - 1) / num
        moved = of_outputs * (1 / (1 + np.exp(-out)) - x) / num
        one = Called(2 * t, [x], [mean, log], [mean], [], True, None, derivatives={0: [by_mean], 1: [by_log]})
        two = Called(2 * t + 1, [z], [out], [mean], [], True, None, derivatives={0: [moved]})
        logs[0].called.append(one)
        logs[1].called.append(two)
    found = list(divergence(*(SimpleNamespace(model=SimpleNamespace(name="m"), log=log) for log in logs)))
    assert [part in told for part, told in zip(said, found, strict=True)] == [True] * len(said), found


@pytest.mark.parametrize(
    ("other", "part"), [(0, "the same mixture of their labels in 10"), (1, "the loss gets other l")]
)
def test_labels_that_are_mixed_otherwise_than_the_inputs_are_said(other, part):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype("float32"), np.eye(5)[np.arange(40) % 5]
    i, a = rng.permutation(40)[:12], rng.uniform(0.2, 0.8, (12, 1)).astype("float32")
    a[:2] = 0  # no mixtures
    j = (i + 7) % 40
    inputs, labels = a * x[i] + (1 - a) * x[j], a * y[i] + (1 - a) * y[(j + other) % 40]
    given = [([inputs[k : k + 4]], labels[k : k + 4]) for k in (0, 4, 8)]
    (note,) = mixed(x, y, given)
    assert (part in note, "in 10 of 12 rows" in note, isinstance(note, Likely)) == (True, True, bool(other)), note
    assert not list(mixed(x, y, [([rng.normal(size=(4, 6))], labels[:4])]))


@pytest.mark.skipif(ENGINE != "jax", reason="the loop is JAX's")
def test_steps_by_hand_are_judged_up_to_the_one_that_is_not_finite():
    import jax

    x = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    def loss(weights, x):
        return ((model.stateless_call(weights, [], x, training=True)[0] - x[:, :1]) ** 2).mean()

    with stepcheck.watch(model, (x, x[:, :1]), loss="mse") as report:
        weights = [variable.value for variable in model.trainable_variables]
        for start in [*range(0, 24, 4)] * 2:
            rate = 0.01 if start < 16 else np.inf
            weights = [
                w - rate * g for w, g in zip(weights, jax.grad(loss)(weights, x[start : start + 4]), strict=True)
            ]
    assert report.causes == []
    assert "here by 0.01 times the gradient." in report.notes[0]
    assert report.notes[1] == "Weights are not finite from update 5 on: not judged."
