"""The audit of right PyTorch loops that it once accused or assured: unused passes, penalties, losses of batches."""

from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import stepcheck  # noqa: E402

X = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(48) % 3


def network(num=4):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, num))


# ---- forward passes whose gradient is not taken ----


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_backward_behind_the_loop_over_batches_is_said_first(is_wanted):
    model, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, data=(X, CLASSES), loss=loss_fn) as report:
        for _ in range(4):
            for rows in torch.randperm(48).split(8):
                with torch.set_grad_enabled(is_wanted or int(rows[0]) < 0):
                    loss_fn(model(X[rows]), CLASSES[rows])
            optimizer.zero_grad()
            loss_fn(model(X), CLASSES).backward()
            optimizer.step()
    told = "24 of 28 forward passes in training mode gave no gradient. Nothing else found in 4 updates"
    assert report.causes == []
    assert report.first_line.startswith(told if is_wanted else "Nothing found in 4 updates"), str(report)


# ---- several backward passes for one step ----

CRITIC = """
import torch
from torch import nn
torch.manual_seed(0)
real = torch.randn(128, 2) * 0.5 + 1
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
of_g, of_d = (torch.optim.Adam(each.parameters(), 1e-3) for each in (G, D))


def penalty(one, two):
    share = torch.rand(len(one), 1)
    between = (share * one + (1 - share) * two).requires_grad_(True)
    out = D(between)
    (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
    return 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()


for epoch in range(3):
    for batch in real[torch.randperm(128)].split(16):
        D.zero_grad()
        fake = G(torch.randn(len(batch), 4)).detach()
        penalty(batch, fake).backward()
        (D(fake).mean() - D(batch).mean()).backward()
        of_d.step()
        G.zero_grad()
        (-D(G(torch.randn(len(batch), 4))).mean()).backward()
        of_g.step()
"""
LEFT = "The gradients that a loss of another module's step leaves in this one"


# ---- losses of whole batches ----


class Contrastive(nn.Module):
    """The supervised contrastive loss of a batch."""

    def forward(self, features, labels):
        features = functional.normalize(features, dim=1)
        logits, others = features @ features.T / 0.5, 1 - torch.eye(len(features))
        same = (labels[:, None] == labels[None]).float() * others
        logs = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        return -((same * logs).sum(1) / same.sum(1).clamp_min(1)).mean()


def trained(loss, *, is_stated, num_batches=1):
    """Return the report of a right loop, of updates of several batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, data=(X, CLASSES), loss=loss if is_stated else None) as report:
        for _ in range(2):
            for i, rows in enumerate(torch.randperm(48).split(12)):
                (loss(model(X[rows]), CLASSES[rows]) / num_batches).backward()
                if (i + 1) % num_batches == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return report


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_loss_of_a_whole_batch_is_judged_as_a_whole(is_stated):
    report = trained(Contrastive(), is_stated=is_stated)
    assert report.first_line.startswith("Nothing found in 8 updates: rows, mode, gradient"), str(report)


def test_microbatches_of_a_loss_of_a_batch_are_not_judged():
    report = trained(Contrastive(), is_stated=True, num_batches=2)
    assert report.causes == [], str(report)
    assert any("is not the mean of its rows' losses" in told for told in report.unseen), str(report)


# ---- losses that refuse some outputs, and what is trained ----


def test_a_loss_that_refuses_later_outputs_does_not_end_the_search():
    """As of a net of physics: the outputs of the first pass are between 0 and 1, and `BCELoss` seems possible."""
    torch.manual_seed(0)
    model, t = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), torch.linspace(0, 1, 16).reshape(-1, 1)
    with torch.no_grad():
        model[2].weight.mul_(0.1)
        model[2].bias.fill_(0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with stepcheck.watch(model, data=(t, torch.exp(-t))) as report:
        for _ in range(8):
            given = t.clone().requires_grad_(True)
            u = model(given)
            (slope,) = torch.autograd.grad(u, given, torch.ones_like(u), create_graph=True)
            loss = ((slope - 3) ** 2).mean() + ((u - 2) ** 4).mean() / 8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert report.has_seen, str(report)
    assert "has failed" not in " ".join(report.unseen), str(report)


def test_a_second_stage_of_as_many_parameters_is_judged():
    model, loss_fn = network(5), nn.CrossEntropyLoss()
    with stepcheck.watch(model, data=(X, CLASSES), loss=loss_fn) as report:
        for i in (0, 2):
            for j in (0, 2):
                model[j].requires_grad_(i == j)
            optimizer = torch.optim.SGD(model[i].parameters(), 0.05)
            for rows in (part for _ in range(2) for part in torch.randperm(48).split(12)):
                optimizer.zero_grad()
                loss_fn(model(X[rows]), CLASSES[rows]).backward()
                optimizer.step()
    assert report.first_line.startswith("Nothing found in 8 updates"), str(report)
