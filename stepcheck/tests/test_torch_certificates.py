"""Loops that must get no certificate, and right loops beside them that must get one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from small_torch import (  # noqa: E402
    CLASSES,
    CROSS,
    X,
    batches,
    faults,
    network,
    reasons,
    seeded,
    watched,
)
from torch import nn  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.faults import Fault, Stage  # noqa: E402
from stepcheck.values import Reason  # noqa: E402

SGD = torch.optim.SGD


def looped(model, *, before_step=None, make=SGD, penalty=0.0, change=None):
    """Return the report on a loop of whole batches.

    Args:
        before_step: is called with the model between backward pass and step.
        make: the class of the optimizer.
        penalty: how much of the squares of the weights is added to the loss.
        change: is called with the model once the optimizer is made.
    """

    def train():
        optimizer = make(model.parameters(), 0.1)
        if change is not None:
            change(model)
        for rows in batches():
            optimizer.zero_grad()
            squares = sum(p.square().sum() for p in model.parameters())
            loss = CROSS(model(X[rows]), CLASSES[rows])
            (loss + penalty * squares).backward()
            if before_step is not None:
                before_step(model)
            optimizer.step()

    seeded()
    return watched(model, train)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_clip_is_proved_up_to_its_bound(clip):
    bound = 0.05

    def clipped(model):
        getattr(nn.utils, clip)(model.parameters(), bound)

    report = looped(network(), before_step=clipped)
    assert report.is_right, str(report)
    assert reasons(report) == [Reason.CLIPPED_BY_HAND]
    assert "Largest distance of 18 gradients" in report.first_line


ORDERS = pytest.mark.parametrize(
    ("bound", "order"), [(0.02, float("inf")), (0.5, 1.0), (0.1, 2.0)]
)


@ORDERS
def test_a_clip_by_any_norm_is_no_error(bound, order):
    def clipped(model):
        nn.utils.clip_grad_norm_(model.parameters(), bound, order)

    report = looped(network(), before_step=clipped)
    assert report.is_right, str(report)
    assert reasons(report) == [Reason.CLIPPED_BY_HAND]


@ORDERS
def test_a_clip_of_a_single_update_is_no_error(bound, order):
    model = network()

    def train():
        CROSS(model(X), CLASSES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), bound, order)
        SGD(model.parameters(), 0.1).step()

    report = watched(model, train)
    assert report.is_right, str(report)
    assert reasons(report) == [Reason.CLIPPED_BY_HAND]


@pytest.mark.parametrize("factor", [0.37, 0.5])
def test_a_loss_that_is_smaller_in_each_update_is_no_clip(factor):
    def scaled(model):
        for weight in model.parameters():
            weight.grad *= factor

    report = looped(network(), before_step=scaled)
    assert faults(report) == [Fault.ROWS_COUNTED_OTHERWISE]


@pytest.mark.parametrize("penalty", [0.1, -0.1])
def test_a_penalty_that_is_not_stated_is_no_certificate(penalty):
    report = looped(network(), penalty=penalty)
    assert (faults(report), reasons(report)) == ([], [Reason.PENALTY_BY_HAND])
    assert Stage.GRADIENT not in report.judged
    with pytest.raises(AssertionError):
        report.require()


def test_a_layer_that_is_replaced_after_the_optimizer_is_made_is_seen():
    def replaced(model):
        model[2] = nn.Linear(6, 4)

    report = looped(network(), change=replaced)
    assert not report.is_right
    assert reasons(report) == [Reason.NOT_HANDED], str(report)


def test_a_softmax_beside_a_clip_is_one_finding():
    def clipped(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)

    model = nn.Sequential(network(), nn.Softmax(1))
    seeded()

    def train():
        optimizer = SGD(model.parameters(), 0.1)
        for rows in batches():
            optimizer.zero_grad()
            CROSS(model(X[rows]).softmax(1), CLASSES[rows]).backward()
            clipped(model)
            optimizer.step()

    report = watched(model, train)
    assert faults(report) == [Fault.SOFTMAX_TWICE], str(report)


class Ascent(SGD):
    """Steps up."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=self.param_groups[0]["lr"])


class AtRate(Ascent):
    """Steps down, at its rate."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def test_a_step_without_a_rule_is_judged_only_at_its_optimizers_rate():
    assert looped(network(), make=AtRate).is_right
    report = looped(network(), make=Ascent)
    assert Stage.STEP not in report.judged, str(report)


def test_an_optimizer_that_is_made_anew_is_found_under_a_schedule_of_each_update():
    model = network()

    def train():
        for _ in range(3):
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            for rows in batches(1):
                optimizer.zero_grad()
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                optimizer.step()
                schedule.step()

    seeded()
    assert faults(watched(model, train)) == [Fault.OPTIMIZER_RE_CREATED]


def test_a_clip_by_value_of_scaled_gradients_is_found():
    model = network()

    def train():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = SGD(model.parameters(), 0.1)
        for rows in batches():
            optimizer.zero_grad()
            scaler.scale(CROSS(model(X[rows]), CLASSES[rows])).backward()
            nn.utils.clip_grad_value_(model.parameters(), 50.0)
            scaler.step(optimizer)
            scaler.update()

    seeded()
    assert faults(watched(model, train)) == [Fault.CLIP_BEFORE_UNSCALE]


@pytest.mark.parametrize("are_moved", [False, True])
def test_weights_that_move_inside_of_later_windows_are_found(are_moved):
    model = network()

    def train():
        for i, rows in enumerate(batches()):
            optimizer = SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            for part in rows.split(2):
                share = len(part) / len(rows)
                loss = CROSS(model(X[part]), CLASSES[part])
                (share * loss).backward()
                if i and are_moved:
                    with torch.no_grad():
                        model[0].weight.mul_(0.9)
            optimizer.step()

    seeded()
    report = watched(model, train)
    is_found = Fault.DECAY_BY_MICROBATCH in faults(report)
    assert is_found == are_moved, str(report)


def test_two_gradients_before_two_steps_are_two_updates():
    model = network()
    params = [*model.parameters()]

    def train():
        optimizer = SGD(params, 0.01)
        for rows in batches():
            for own in [*map(gradients, rows.split(2))]:
                for p, grad in zip(params, own, strict=True):
                    p.grad = grad
                optimizer.step()

    def gradients(part):
        loss = CROSS(model(X[part]), CLASSES[part])
        return torch.autograd.grad(loss, params)

    seeded()
    assert watched(model, train).findings == []


def test_labels_of_minus_100_with_another_loss_have_a_finding():
    labels = CLASSES.clone()
    labels[::5] = -100
    model = network()

    def train():
        optimizer = SGD(model.parameters(), 0.1)
        for rows in batches():
            optimizer.zero_grad()
            CROSS(model(X[rows]), labels[rows].clamp(min=0)).backward()
            optimizer.step()

    seeded()
    report = watched(model, train, data=(X, labels))
    assert {each.stage for each in report.findings} == {Stage.GRADIENT}


def test_hooks_of_the_user_do_not_run_for_each_replay():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(len(seen)))
    report = looped(model)
    assert report.is_right, str(report)
    num_passes = 18
    assert num_passes <= len(seen) <= num_passes + 3


def test_statistics_are_moved_by_passes_in_training_mode_alone():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    report = looped(model, change=lambda own: own.eval())
    assert faults(report) == [Fault.INFERENCE_MODE]
    state = report.as_json()["facts"]["state"]
    assert np.sum([*state.values()]) == 0


def noised(model, optimizer):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-2)


def halved(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def counted_anew(model, optimizer):
    for state in optimizer.state.values():
        state["step"].zero_()


def cleared_once(model, optimizer):
    if (
        len(optimizer.state)
        and next(iter(optimizer.state.values()))["step"] == 9
    ):
        optimizer.state.clear()


def rated(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


@pytest.mark.parametrize(
    "write", [noised, halved, counted_anew, cleared_once, rated]
)
def test_what_is_written_between_backward_pass_and_step_is_no_certificate(
    write,
):
    model = network()

    def train():
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for rows in batches():
            optimizer.zero_grad()
            CROSS(model(X[rows]), CLASSES[rows]).backward()
            write(model, optimizer)
            optimizer.step()

    seeded()
    report = watched(model, train)
    assert report.findings == [], str(report)
    written = [] if write is rated else [Reason.WRITTEN]
    assert reasons(report) == written, str(report)


def of_parts(model, *rates):
    """Return an optimizer of two groups, or two optimizers."""
    one, two = model[0].parameters(), model[2].parameters()
    first, second = rates
    if isinstance(first, float):
        groups = [{"params": [*one], "lr": first}, {"params": [*two]}]
        return [SGD(groups, second)]
    return [SGD([*one], 0.1, **first), SGD([*two], 0.1, **second)]


@pytest.mark.parametrize(
    ("rates", "is_judged"),
    [
        ((0.1, 0.1), True),
        ((0.1, 0.2), False),
        (({}, {}), True),
        (({}, {"momentum": 0.5}), False),
    ],
)
def test_one_stated_rate_or_optimizer_is_no_certificate_for_several(
    rates, is_judged
):
    model = network()

    def train():
        optimizers = of_parts(model, *rates)
        for rows in batches():
            model.zero_grad()
            CROSS(model(X[rows]), CLASSES[rows]).backward()
            for optimizer in optimizers:
                optimizer.step()

    seeded()
    meant = SGD(model.parameters(), 0.1)
    report = watched(model, train, optimizer=meant, learning_rate=0.1)
    assert report.findings == [], str(report)
    assert (Stage.STEP in report.judged) == is_judged, str(report)
    assert reasons(report) == [Reason.SEVERAL_STEPS] * (not is_judged)


class Amplifying(nn.Module):
    """Makes rounding grow; its products are rounded otherwise after the loop."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 4), factor
        self.has_ended = False

    def forward(self, x):
        weight, bias = self.layer.weight, self.layer.bias
        if self.has_ended:
            x, weight, bias = x.double(), weight.double(), bias.double()
        made = (x @ weight.T + bias).float()
        return made + torch.sin(self.factor * made) / self.factor**0.5


@pytest.mark.parametrize(
    ("factor", "share", "expected"),
    [
        (1.0, 1.0, ([], [])),
        (3e5, 1.0, ([], [Reason.ROUNDED])),
        (3e5, 5.0, ([Stage.GRADIENT], [])),
    ],
)
def test_differences_that_rounding_makes_are_not_judged(
    factor, share, expected
):
    model = Amplifying(factor)

    def train():
        optimizer = SGD(model.parameters(), 1e-9)
        for rows in batches():
            optimizer.zero_grad()
            (share * CROSS(model(X[rows]), CLASSES[rows])).backward()
            optimizer.step()
        model.has_ended = True

    seeded()
    report = watched(model, train)
    stages = [each.stage for each in report.findings]
    assert (stages, reasons(report)) == expected, str(report)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_a_masked_mean_in_one_number_is_no_error_in_a_new_model(spread):
    """Its rows' losses are nearly alike, and so are the means of any divisor."""
    tokens = torch.randint(1, 6, (24, 5))
    tokens[torch.arange(5)[None] > torch.arange(24)[:, None] % 5] = 0
    seeded()
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    with torch.no_grad():
        model[1].weight *= spread
        model[1].bias *= spread

    def loss(outputs, labels):
        each = nn.functional.cross_entropy(
            outputs.flatten(0, 1), labels.flatten(), reduction="none"
        )
        mask = (labels.flatten() > 0).float()
        return (each * mask).sum() / mask.sum()

    def train():
        optimizer = SGD(model.parameters(), 0.1)
        for rows in torch.arange(24).split(6):
            optimizer.zero_grad()
            loss(model(tokens[rows]), tokens[rows]).backward()
            optimizer.step()

    with stepcheck.watch(model, data=(tokens, tokens), loss=loss) as report:
        train()
    assert report.is_right, str(report)
