"""Intentions of PyTorch that are functions of a module and a batch, and models that train in turn."""

from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec(
    "tensorflow"
):  # whose libraries end a process that loads both
    pytest.skip(
        "PyTorch with Triton, beside TensorFlow", allow_module_level=True
    )
torch = pytest.importorskip("torch")

from small_torch import (  # noqa: E402
    NUM,
    X,
    batches,
    checked,
    faults,
    network,
    reasons,
    seeded,
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.faults import Fault, Stage  # noqa: E402
from stepcheck.values import Reason  # noqa: E402

TARGETS = functional.normalize(
    torch.randn(NUM, 4, generator=torch.Generator().manual_seed(1))
)
SAME = 0.2 + 0.6 * (torch.arange(NUM) % 2)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(2, 3)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        return (
            self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()),
            mean,
            spread,
        )


def bound(model, batch):
    (x,) = batch
    out, mean, spread = model(x)
    kl = (mean**2 + spread.exp() - spread - 1).sum(1) / 2
    return {"fit": ((out - x) ** 2).sum(1), "kl": kl}


def pairs(model, batch):
    (a, b), is_same = batch
    apart = ((model(a) - model(b)) ** 2).sum(1)
    return {"pull": (apart, is_same), "push": (1 / (1 + apart), 1 - is_same)}


def contrast(model, batch):
    x, targets = batch
    scores = functional.normalize(model(x)) @ targets.T
    return functional.cross_entropy(scores, torch.arange(len(x)))


teacher = network()


def distilled(model, batch):
    (x,) = batch
    with torch.no_grad():
        wanted = teacher(x)
    return (model(x) - wanted) ** 2


def policy(model, batch):
    states, actions, advantages, masks = batch
    chosen = model(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
    return {"policy": (-chosen * advantages, masks)}


def total(terms):
    """Return the loss of a batch."""
    terms = terms if isinstance(terms, dict) else {"loss": terms}
    pairs = [
        term if isinstance(term, tuple) else (term, torch.ones(()))
        for term in terms.values()
    ]
    weighted = [
        (values, weights.expand(values.shape)) for values, weights in pairs
    ]
    return sum(
        (values * weights).sum() / weights.sum() for values, weights in weighted
    )


def parts(leaf, rows):
    return (
        tuple(each[rows] for each in leaf)
        if isinstance(leaf, tuple)
        else leaf[rows]
    )


LEARNED = nn.Parameter(torch.ones(()))
ACTIONS = torch.arange(NUM) % 4
POLICY = X, ACTIONS, X[:, 0] * 2, 0.5 + (torch.arange(NUM) % 3)
KINDS = {  # the function, the number of its calls, the model, the data
    "autoencoder": (bound, 1, Autoencoder, (X,)),
    "pairs": (pairs, 2, network, ((X, X.flip(0) / 2), SAME)),
    "contrast": (contrast, 1, network, (X, TARGETS)),
    "teacher": (distilled, 1, network, (X,)),
    "policy": (policy, 1, network, POLICY),
}


def trained(function, calls, model, data, factor=1.0, **given):
    """Return the report on a loop that minimises what a function returns, times a factor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loss = stepcheck.Objective(function, calls)
    with stepcheck.watch(model, data, loss, **given) as report:
        for rows in batches():
            optimizer.zero_grad()
            batch = tuple(parts(leaf, rows) for leaf in data)
            (factor * total(function(model, batch))).backward()
            optimizer.step()
    return checked(report)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_of_model_and_batch_is_an_intention(kind):
    seeded()
    function, calls, make, data = KINDS[kind]
    report = trained(function, calls, make(), data)
    assert report.is_right, report
    wrong = trained(function, calls, make(), data, factor=2.0)
    assert [found.stage for found in wrong.findings] == [Stage.GRADIENT], wrong


def test_a_term_that_counts_half_is_found():
    def halved(model, batch):
        terms = bound(model, batch)
        return terms | {"kl": terms["kl"] / 2}

    seeded()
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, (X,), stepcheck.Objective(bound)) as report:
        for rows in batches():
            optimizer.zero_grad()
            total(halved(model, (X[rows],))).backward()
            optimizer.step()
    assert faults(checked(report)) == [Fault.OTHER_LOSS_WEIGHTS], report


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda model, batch: model(batch[0])[:2], 1),
        (lambda model, batch: 1 / 0, 1),
        (lambda model, batch: batch[0].sum(1), 1),
        (lambda model, batch: (model(batch[0]) + model(batch[0])).sum(1), 1),
        (lambda model, batch: model(batch[0] + 0 * torch.rand(3)).sum(1), 1),
        (lambda model, batch: model(batch[0]).sum(1) + 0 * torch.rand(1), 1),
        (lambda model, batch: model(batch[0]).sum(1) + 0 * LEARNED, 1),
    ],
)
def test_a_function_that_does_not_fit_is_not_judged(function, calls):
    model = network()
    with stepcheck.watch(
        model, (X,), stepcheck.Objective(function, calls)
    ) as report:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for rows in batches():
            optimizer.zero_grad()
            model(X[rows]).sum().backward()
            optimizer.step()
    assert checked(report).findings == []
    assert Reason.LOSS_FAILED in reasons(report)
    assert Stage.GRADIENT not in report.judged


def test_a_loss_of_a_whole_batch_is_not_judged_in_microbatches():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(
        model, (X, TARGETS), stepcheck.Objective(contrast)
    ) as report:
        for i, rows in enumerate(batches()):
            (contrast(model, (X[rows], TARGETS[rows])) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert checked(report).findings == []
    assert Reason.COUPLED in reasons(report)


# ---- models that train in turn ----

cross = functional.binary_cross_entropy_with_logits


class Adversaries:
    """A generator and a critic, each with its loss, and a loop with a fault or without."""

    def __init__(self):
        seeded()
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Sequential(
            nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 1)
        )
        models = self.generator, self.critic
        self.of_generator, self.of_critic = (
            torch.optim.Adam(each.parameters(), 0.01) for each in models
        )

    def loss_of_critic(self, critic, batch):
        real, made = batch
        outputs = {"real": critic(real), "made": critic(made)}
        wanted = {"real": 1.0, "made": 0.0}
        return {
            name: cross(
                out, torch.full_like(out, wanted[name]), reduction="none"
            )
            for name, out in outputs.items()
        }

    def loss_of_generator(self, generator, batch):
        out = self.critic(generator(*batch))
        return cross(out, torch.ones_like(out), reduction="none")

    def train(self, fault=""):
        for rows in batches():
            made = self.generator(torch.randn(len(rows), 2))
            self.of_critic.zero_grad()
            given = made if fault == "not detached" else made.detach()
            total(self.loss_of_critic(self.critic, (X[rows], given))).backward(
                retain_graph=True
            )
            self.of_critic.step()
            if fault != "not detached":
                self.of_generator.zero_grad()
            out = self.critic(made)
            (
                cross(out, torch.ones_like(out))
                * (2 if fault == "twice" else 1)
            ).backward()
            self.of_generator.step()


@pytest.mark.parametrize(
    ("fault", "num"), [("", 0), ("twice", 1), ("not detached", 1)]
)
def test_models_that_train_in_turn_are_watched_in_one_with(fault, num):
    own = Adversaries()
    of_generator = stepcheck.Objective(own.loss_of_generator)
    of_critic = stepcheck.Objective(own.loss_of_critic, calls=2)
    with (
        stepcheck.watch(own.generator, None, of_generator) as one,
        stepcheck.watch(own.critic, None, of_critic) as two,
    ):
        own.train(fault)
    assert len(checked(one).findings) == num, one
    assert checked(two).findings == [], two
    for report in (one, two):
        assert [*report.judged] == [
            Stage.MODE,
            Stage.GRADIENT,
            Stage.STEP,
            Stage.STATE,
        ], report


def test_a_judgement_moves_no_other_model():
    own = Adversaries()
    own.train()
    expected = [value.clone() for value in own.critic.state_dict().values()]
    own = Adversaries()
    loss = stepcheck.Objective(own.loss_of_generator)
    with stepcheck.watch(own.generator, None, loss) as report:
        own.train()
    assert report.findings == []
    assert all(map(torch.equal, own.critic.state_dict().values(), expected))
    assert [part.training for part in own.critic.modules()] == [True] * 5
