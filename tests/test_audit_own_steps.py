"""Loops by hand: beside `fit`, with an optimizer of the script, and with a loss that has to be supposed."""

import keras
import numpy as np
import pytest
from audit_scripts import script
from shares import halves

from wholestep.audit.log import Applied
from wholestep.audit.readings import Moves, solved
from wholestep.audit.steps import apply
from wholestep.audit.windows import Piece, Update

ENGINE = keras.backend.backend()
PIECE = Piece(None, np.arange(3))  # type: ignore[arg-type]


LOOP = "for epoch in range(2):"
OF_OTHER = "other = network()\nother.compile('adam', 'mse')\nother.fit(x, y, epochs=9, batch_size=4, verbose=0)\n"
OF_ITSELF = "model.fit(x[:16], y[:16], epochs=9, batch_size=4, verbose=0)\n"


@pytest.mark.parametrize("first", [OF_OTHER, OF_ITSELF])
@pytest.mark.parametrize(("labels", "code", "part"), [("b[:, None]", 0, "24 rows"), ("b", 1, "1. gradient: broadcast")])
def test_a_loop_by_hand_is_judged_and_not_the_fit_before_it(first, labels, code, part, report_of):
    got, out = report_of(script("by hand", (LOOP, f"{first}{LOOP}"), ("b[:, None]", labels)), "--updates", 6)
    assert (got, part in out, "loop: trained by the `fit` at " in out) == (code, True, True), out


def test_a_fit_after_which_no_gradient_is_taken_is_judged(report_of):
    code, out = report_of(script("fit"), "--updates", 6)
    assert (code, "data: what `fit` was given" in out, "loop: " in out) == (0, True, False), out


def fall(kind, grads, params):
    """Return the falls of the weights by an optimizer, at rates of 0.1."""
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    for t, (g, p) in enumerate(zip(grads, params, strict=True), start=1):
        if kind in ("momentum", "nesterov"):
            first = 0.9 * first + g
            yield 0.1 * (first if kind == "momentum" else g + 0.9 * first)
            continue
        count = 1 if kind == "a frozen count" else t
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        step = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.99**count)) + 1e-8)
        yield 0.1 * (step + 0.05 * p * KERNELS * (kind == "decay"))


KERNELS = np.arange(90) < 80


@pytest.mark.parametrize(
    ("kind", "told", "note"),
    [
        ("momentum", "0.9 times the move before", ""),
        ("nesterov", "0.9 times the move before", ""),
        ("adam", "mean with 0.9, over the root of its mean square with 0.99)", ""),
        ("decay", "mean with 0.9, over the root of its mean square with 0.99)", ""),
        ("a frozen count", "mean with 0.9", "does the count of updates move?"),
    ],
)
def test_an_optimizer_by_hand_is_solved_for(kind, told, note):
    rng = np.random.default_rng(0)
    grads, params = (list(rng.normal(size=(6, 90))) for _ in range(2))
    moves = Moves(params, list(fall(kind, grads, params)), grads, [1e-3] * 6, KERNELS)
    rule = solved(moves)
    assert rule is not None
    assert (told in rule.told, note in rule.note, bool(rule.note)) == (True, True, bool(note))
    assert rule.rates == pytest.approx([0.1] * 6, rel=1e-3)
    assert solved(moves._replace(grads=list(rng.normal(size=(6, 90))))) is None


def test_optimizers_that_move_the_same_variables_in_turn_begin_nothing_anew():
    grads, slots = [np.ones(3, "float32")], [[np.full(1, float(i // 2))] for i in range(8)]
    steps = [Applied(i, i % 2, grads, grads, slots[i], grads, slots[i + 2], 0.1, i // 2, None) for i in range(6)]
    updates = [Update(i, [PIECE], step) for i, step in enumerate(steps, start=1)]
    assert list(apply(updates, None)) == ["2 optimizers move the same variables in turn. Is that meant?"]


CUT = [("def value(model, a, b):", "def value(model, a, b):\n    a, b = a[:, :-1], a[:, 1:]"), ("a > 0", "b > 0")]


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    halves(
        [
            ([], 0, "entropy at the places whose inputs are not 0, supposed"),
            (CUT, 0, "entropy at the places whose labels are not 0, supposed"),
            (
                [("losses * mask", "losses"), ("/ keras.ops.sum(mask)", "/ 56")],
                0,
                "loss: sparse_categorical_crossentropy, supposed",
            ),
        ]
    ),
)
def test_the_loss_of_padded_tokens_is_supposed(edits, code, part, report_of):
    got, out = report_of(script("tokens", *edits))
    assert (got, part in out) == (code, True), out


@pytest.mark.skipif(ENGINE != "jax", reason="a script for JAX")
def test_gradients_by_an_optimizer_by_hand_are_judged(report_of):
    code, out = report_of(script("own adam"))
    assert (code, "loss: mean_squared_error, supposed" in out) == (0, True), out
    assert "here 0.01 times the gradient in each (its mean with 0.9, over the root" in out


@pytest.mark.skipif(ENGINE != "jax", reason="a script for JAX")
def test_gradients_that_are_always_taken_at_the_first_weights_come_first(report_of):
    stale = ("moved(params, means, x[rows]", "moved(params, first, means, x[rows]")
    taken = ("moved(params, means, a", "moved(params, first, means, a"), ("(value)(params, a", "(value)(first, a")
    code, out = report_of(script("own adam", stale, *taken))
    assert (code, "every gradient is taken at the weights of the beginning" in out.splitlines()[0]) == (1, True), out


BY_KERAS = [
    ("keras.ops.mean((first - b[0]) ** 2)", "keras.losses.MeanSquaredError()(b[0], first)"),
    (
        "keras.ops.mean(keras.ops.sparse_categorical_crossentropy(b[1], second, from_logits=True))",
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True)(b[1], second)",
    ),
]


@pytest.mark.parametrize(
    ("edits", "code", "part"),
    [
        (
            [],
            0,
            "loss: mean_squared_error of age as labels, sparse_categorical_crossentropy of kind as labels, supposed",
        ),
        ([("OF_AGE, OF_KIND = 1.0, 1.0", "OF_AGE, OF_KIND = 1.0, 0.2")], 0, "Is that meant?"),
        ([("OF_AGE, OF_KIND = 1.0, 1.0", "OF_AGE, OF_KIND = 1.0, 0.0")], 0, "Is that meant?"),
        ([("OF_AGE, OF_KIND = 1.0, 1.0", "OF_AGE, OF_KIND = 1.0, 0.0"), *BY_KERAS], 1, "1. gradient: output left out"),
    ],
)
def test_each_of_several_outputs_has_a_supposed_loss(edits, code, part, report_of):
    got, out = report_of(script("heads", *edits))
    assert (got, part in out) == (code, True), out
