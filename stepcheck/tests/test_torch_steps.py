"""The arithmetic of PyTorch's optimizers, and what the steps of watched loops are found to be."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from small_torch import CLASSES, CROSS, X, batches, network, seeded  # noqa: E402
from torch import optim  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.faults import Fault, Quantity, Stage  # noqa: E402
from stepcheck.steps import HALF_EPS, begun, stepped  # noqa: E402
from stepcheck.torch.steps import rule_of  # noqa: E402
from stepcheck.values import Reason  # noqa: E402

SETTINGS = {
    "sgd": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
    ),
    "maximize": (optim.SGD, {"lr": 0.1, "maximize": True}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam of other settings": (
        optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3},
    ),
    "amsgrad": (
        optim.Adam,
        {"lr": 0.01, "amsgrad": True, "betas": (0.9, 0.9), "maximize": True},
    ),
    "fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "rate in a tensor": (
        optim.Adam,
        {"lr": torch.tensor(0.01), "foreach": False},
    ),
    "decoupled": (
        optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "centered": (
        optim.RMSprop,
        {"lr": 0.01, "momentum": 0.9, "centered": True},
    ),
    "adagrad": (
        optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
}
OTHERS = [
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Rprop,
    optim.ASGD,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_rule_makes_the_steps_of_pytorch(kind, dtype):
    make, given = SETTINGS[kind]
    draw = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, generator=draw).to(dtype))
    optimizer = make([p], **given)
    weights, slots = p.detach().float().numpy().copy(), None
    for count in range(6):
        p.grad = torch.randn(50, generator=draw).to(dtype)
        rule = rule_of(optimizer, optimizer.param_groups[0], count)
        slots = begun(rule, weights) if slots is None else slots
        weights, slots = stepped(
            rule, weights, p.grad.clone().float().numpy(), slots
        )
        optimizer.step()
    near = 2e-6 if dtype is torch.float32 else 4 * HALF_EPS
    assert np.allclose(
        weights, p.detach().float().numpy(), rtol=near, atol=near
    )


def loop(model, own, *, after=lambda model: None, **meant):
    seeded()
    with stepcheck.watch(model, (X, CLASSES), CROSS, **meant) as report:
        for rows in batches(3):
            own.zero_grad()
            CROSS(model(X[rows]), CLASSES[rows]).backward()
            own.step()
            after(model)
    return report


def faults(report):
    return [each.fault for each in report.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SETTINGS)
def test_right_steps_are_right(kind, dtype):
    make, given = SETTINGS[kind]
    model = network()
    parts = [{"params": [p]} for p in model.parameters()]
    parts[0]["lr"] = 0.05
    report = loop(model, make(parts, **given))
    assert report.findings == [], str(report)
    assert "step" in report.judged
    assert report.unjudged == [], str(report)


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw", "rmsprop"])
def test_right_steps_in_half_precision_are_right(kind):
    make, given = SETTINGS[kind]
    model = network().to(torch.bfloat16)
    seeded()
    optimizer = make(model.parameters(), **given)
    with stepcheck.watch(
        model, (X.to(torch.bfloat16), CLASSES), CROSS
    ) as report:
        for rows in batches(3):
            optimizer.zero_grad()
            CROSS(model(X[rows].to(torch.bfloat16)), CLASSES[rows]).backward()
            optimizer.step()
    assert [each for each in report.findings if each.stage == "step"] == [], (
        str(report)
    )


@pytest.mark.parametrize("make", OTHERS)
def test_steps_that_have_no_rule_are_not_judged(make):
    model = network()
    report = loop(model, make(model.parameters(), lr=0.01))
    assert report.findings == [], str(report)
    assert [each.reason for each in report.unjudged] == [Reason.STEP_UNKNOWN]


class Halved(optim.Adam):
    """Adam whose steps are half as long."""

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        before = [p.clone() for p in params]
        optim.Adam.step.__wrapped__(self)
        for p, old in zip(params, before, strict=True):
            p.lerp_(old, 0.5)


@pytest.mark.parametrize(
    ("kind", "stated", "found"),
    [
        (optim.Adam, optim.Adam, []),
        (Halved, optim.Adam, []),
        (Halved, None, []),
        (optim.AdamW, optim.Adam, [Fault.ANOTHER_OPTIMIZER]),
        (optim.SGD, optim.Adam, [Fault.ANOTHER_OPTIMIZER]),
    ],
)
def test_steps_are_compared_with_those_of_the_stated_optimizer(
    kind, stated, found
):
    model = network()
    optim.Adam(model.parameters())  # whose `step` is hooked from then on
    meant = (
        {}
        if stated is None
        else {"optimizer": stated(model.parameters(), lr=0.01)}
    )
    report = loop(model, kind(model.parameters(), lr=0.01), **meant)
    assert faults(report) == found, str(report)
    assert (Stage.STEP in report.judged) == (kind is not Halved)


def test_a_hook_that_writes_weights_inside_of_a_step_is_found():
    model = network()
    optimizer = optim.Adam(model.parameters(), lr=0.01)

    def halve(*_):
        with torch.no_grad():
            model[0].bias.mul_(0.5)

    optimizer.register_step_post_hook(halve)
    report = loop(model, optimizer)
    (finding,) = report.findings
    assert (finding.fault, finding.quantity) == (
        Fault.STEP_UNLIKE,
        Quantity.STEP,
    ), str(report)
    assert finding.where.parameters == ("0.bias",)
    number = max(finding.proof.numbers, key=lambda each: abs(each.expected))
    assert number.observed == pytest.approx(number.expected / 2, rel=1e-4)
    assert "0.bias" in str(report)


def test_a_state_that_moves_in_a_step_is_found():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def forget(*_):
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)

    optimizer.register_step_post_hook(forget)
    assert faults(loop(model, optimizer)) == [Fault.STEP_UNLIKE]


def test_rates_that_a_schedule_moves_in_a_tensor_are_those_of_each_step():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    report = loop(model, optimizer, after=lambda _: schedule.step())
    assert report.findings == [], str(report)


def test_a_wrong_kind_of_optimizer_is_refused():
    with (
        pytest.raises(
            stepcheck.SpecificationError, match="optimizer of PyTorch"
        ),
        stepcheck.watch(network(), (X, CLASSES), CROSS, optimizer="adam"),
    ):
        pass
