"""Optimizers by hand: which steps the weights make is solved for, and compared with the optimizer that is stated."""

import keras
import numpy as np
import pytest
from small import X, Y, by_hand, descend, faults, network, reasons, square

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.solve.optimizers import Moves, solved
from stepcheck.values import Reason

BETAS = {
    "none": (0.0, 0.0),
}
KERNELS = np.arange(90) < 80
DECAYS = {
    "decay by rate": 0.05,
    "rising decay by rate": 0.05,
    "rising decay": 0.005,
    "decay": 0.2,
    "decay of plain steps": 0.0222,
}
LABELS = Y[:, 0]


def fall(kind, grads, params):
    """Yield the falls of the weights by an optimizer, at rates of 0.1, or rising ones."""
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
        count = 1 if kind == "a frozen count" else t
        one, two = BETAS.get(kind, (0.9, 0.99))
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        step = (
            first
            / (1 - one**count)
            / (np.sqrt(second / (1 - two**count)) + 1e-8)
        )
        yield rate * step + p * KERNELS * DECAYS.get(kind, 0.0) * (
            rate if "by rate" in kind else 1
        )


def moves_of(kind, near=(1e-4,) * 6):
    rng = np.random.default_rng(0)
    grads, params = (list(rng.normal(size=(6, 90))) for _ in range(2))
    return Moves(
        params, list(fall(kind, grads, params)), grads, list(near), KERNELS
    )


@pytest.mark.parametrize(
    ("kind", "momenta"),
    [
        ("momentum", (0.9,)),
        ("nesterov", (0.9,)),
        ("rising nesterov", (0.9,)),
        ("rising nesterov of Keras", (0.9,)),
        ("adam", (0.9, 0.99)),
        ("rising", (0.9, 0.99)),
        ("a frozen count", (0.9, 0.99)),
        ("none", (0.9, 0.99)),
    ],
)
def test_an_optimizer_by_hand_is_solved_for(kind, momenta):
    moves = moves_of(kind, [1e-3] * 6)
    rule = solved(moves)
    assert rule.momenta == pytest.approx(momenta, rel=1e-3)
    assert rule.is_adaptive == (len(momenta) == 2)
    if kind != "a frozen count":
        rates = [0.1 * t if "rising" in kind else 0.1 for t in range(1, 7)]
        assert rule.rates == pytest.approx(rates, rel=1e-3)
    others = list(np.random.default_rng(1).normal(size=(6, 90)))
    assert solved(moves._replace(grads=others)) is None


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("decay by rate", 0.05),
        ("rising decay by rate", 0.05),
        ("decay", 2.0),
        ("adam", 0.0),
    ],
)
def test_a_decay_beside_the_steps_is_solved_for(kind, share):
    assert solved(moves_of(kind)).decay[0] == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "near", "own", "is_known"),
    [
        ("decay by rate", 1e-4, 0.05, True),
        ("decay by rate", 0.1, 0.0, False),
        ("adam", 0.1, 0.0, True),
    ],
)
def test_a_decay_that_does_not_show_in_each_update_is_neither_found_nor_excluded(
    kind, near, own, is_known
):
    rule = solved(moves_of(kind, [1e-4] * 5 + [near]))
    assert rule.decay[0] == pytest.approx(own, rel=1e-3)
    assert np.isfinite(rule.decay[1]) == is_known


# ---- loops ----


def by_momentum(rates, momentum=0.9, sign=1):
    """Return steps with momentum, whose rate is one of these in each update."""
    kept, numbers = {}, iter(rates)

    def move(variables, gradients):
        rate = next(numbers)
        for i, (variable, gradient) in enumerate(
            zip(variables, gradients, strict=True)
        ):
            kept[i] = momentum * kept.get(
                i, 0.0
            ) + rate * keras.ops.convert_to_numpy(gradient)
            variable.assign(variable - sign * kept[i])

    return move


def by_adam(rate=0.01, decay=0.0, bound=None):
    """Return the steps of AdamW, perhaps on clipped gradients."""
    means, squares, count = {}, {}, [0]

    def move(variables, gradients):
        count[0] += 1
        gradients = [*map(keras.ops.convert_to_numpy, gradients)]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        factor = min(1.0, bound / norm) if bound else 1.0
        for i, (variable, gradient) in enumerate(
            zip(variables, gradients, strict=True)
        ):
            means[i] = 0.9 * means.get(i, 0.0) + 0.1 * factor * gradient
            squares[i] = (
                0.999 * squares.get(i, 0.0) + 0.001 * (factor * gradient) ** 2
            )
            mean, square_of = (
                means[i] / (1 - 0.9 ** count[0]),
                squares[i] / (1 - 0.999 ** count[0]),
            )
            variable.assign(
                variable * (1 - rate * decay)
                - rate * mean / (np.sqrt(square_of) + 1e-7)
            )

    return move


def by_lion(rate):
    """Return the steps of an optimizer that is not solved for: of the signs of a mean of gradients."""
    means = {}

    def move(variables, gradients):
        for i, (variable, gradient) in enumerate(
            zip(variables, gradients, strict=True)
        ):
            gradient = keras.ops.convert_to_numpy(gradient)
            mean = means.get(i, 0 * gradient)
            variable.assign(
                variable - rate * np.sign(0.9 * mean + 0.1 * gradient)
            )
            means[i] = 0.99 * mean + 0.01 * gradient

    return move


def report_of(value, move, passes=3, size=8, data=(X, LABELS), **meant):
    model = network()
    with stepcheck.watch(model, data, **({"loss": "mse"} | meant)) as report:
        descend(model, value, data, size, move, passes)
    return report


def summed(outputs, labels):
    return keras.ops.sum((outputs - labels[:, None]) ** 2)


ADAM, SGD = keras.optimizers.Adam, keras.optimizers.SGD


@pytest.mark.parametrize(
    ("move", "optimizer"),
    [
        (by_hand(0.05), SGD(0.05)),
        (by_momentum([0.01] * 40), SGD(0.01, momentum=0.9)),
        (by_adam(), ADAM(0.01)),
        (by_adam(bound=0.5), ADAM(0.01, global_clipnorm=0.5)),
    ],
)
def test_a_right_step_by_hand_is_right(move, optimizer):
    report = report_of(square, move, optimizer=optimizer)
    assert report.findings == [], str(report)
    assert Stage.GRADIENT in report.judged


@pytest.mark.parametrize(
    ("value", "move", "found"),
    [
        (summed, by_hand(0.01), [Fault.NEVER_DIVIDED]),
        (square, by_momentum([0.01] * 40, sign=-1), [Fault.ASCENT]),
        (
            lambda out, y: keras.ops.mean((out - y) ** 2),
            by_adam(),
            [Fault.BROADCAST],
        ),
    ],
)
def test_a_fault_is_found_behind_a_step_by_hand(value, move, found):
    report = report_of(
        value, move, size=7, optimizer=SGD(0.01) if value is summed else None
    )
    assert faults(report) == found, str(report)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (square, []),
        (
            lambda out, y: 12 * square(out, y),
            [],
        ),  # hidden by a step that is not known
        (lambda out, y: keras.ops.mean((out - y) ** 2), [Fault.BROADCAST]),
    ],
)
def test_the_loss_is_judged_behind_an_optimizer_that_is_not_known(value, found):
    report = report_of(value, by_lion(0.003), optimizer=ADAM(0.01))
    assert faults(report) == found, str(report)
    assert Reason.OWN_STEP in reasons(report)
    assert Stage.STEP not in report.judged


def warm(number):
    return 0.002 * min(int(number), 5)


def test_steps_by_hand_whose_rate_begins_at_0_are_judged_by_the_stated_schedule():
    report = report_of(
        square, by_momentum(map(warm, range(40))), passes=4, learning_rate=warm
    )
    assert report.findings == [], str(report)
    assert Stage.STEP in report.judged


def test_a_penalty_that_steps_by_hand_forget_is_found():
    model = network()
    model.trainable_variables[0].regularizer = keras.regularizers.L2(0.1)
    with stepcheck.watch(
        model, (X, LABELS), loss="mse", optimizer=SGD(0.01, momentum=0.9)
    ) as report:
        descend(
            model, square, (X, LABELS), 8, by_momentum([0.01] * 40), passes=3
        )
    assert faults(report) == [Fault.PENALTY_FORGOTTEN], str(report)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_divisor_is_solved_for_under_an_optimizer_by_hand(is_right):
    weights = np.linspace(0.2, 2, len(X)).astype("float32")

    def value(outputs, labels, own):
        total = keras.ops.sum(own[:, None] * (outputs - labels[:, None]) ** 2)
        return total / (len(labels) if is_right else keras.ops.sum(own))

    report = report_of(
        value, by_adam(), data=(X, LABELS, weights), optimizer=ADAM(0.01)
    )
    assert faults(report) == [Fault.DIVIDED_BY_THE_WEIGHTS] * (not is_right), (
        str(report)
    )
    assert Stage.GRADIENT in report.judged


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the loop is JAX's"
)
def test_steps_by_hand_are_judged_up_to_the_one_that_is_not_finite():
    import jax

    model = network()

    def loss(weights, x, y):
        return square(model.stateless_call(weights, [], x, training=True)[0], y)

    with stepcheck.watch(model, (X, LABELS)) as report:
        weights = [variable.value for variable in model.trainable_variables]
        for i, start in enumerate([*range(0, 24, 4)] * 2):
            rate = 0.01 if i < 4 else np.inf
            grads = jax.grad(loss)(
                weights, X[start : start + 4], LABELS[start : start + 4]
            )
            weights = [
                w - rate * g for w, g in zip(weights, grads, strict=True)
            ]
    assert report.findings == []
    assert Reason.NOT_FINITE in reasons(report)


@pytest.mark.parametrize(("momentum", "is_judged"), [(0.9, True), (0.5, False)])
def test_steps_by_hand_of_another_momentum_than_the_stated_one_are_not_certified(
    momentum, is_judged
):
    report = report_of(
        square, by_momentum([0.01] * 40), optimizer=SGD(0.01, momentum=momentum)
    )
    assert report.findings == [], str(report)
    assert (Stage.STEP in report.judged) == is_judged
