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


# ---- losses of whole batches ----


class Contrastive(nn.Module):
    """The supervised contrastive loss of a batch."""

    def forward(self, features, labels):
        features = functional.normalize(features, dim=1)
        logits, others = features @ features.T / 0.5, 1 - torch.eye(len(features))
        same = (labels[:, None] == labels[None]).float() * others
        logs = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        return -((same * logs).sum(1) / same.sum(1).clamp_min(1)).mean()


def trained(loss, *, num_batches=1):
    """Return the report of a right loop, of updates of several batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, data=(X, CLASSES), loss=loss) as report:
        for _ in range(2):
            for i, rows in enumerate(torch.randperm(48).split(12)):
                (loss(model(X[rows]), CLASSES[rows]) / num_batches).backward()
                if (i + 1) % num_batches == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return report


def test_a_loss_of_a_whole_batch_is_judged_as_a_whole():
    report = trained(Contrastive())
    assert report.first_line.startswith("Nothing found in 8 updates: rows, mode, gradient"), str(report)


def test_microbatches_of_a_loss_of_a_batch_are_not_judged():
    report = trained(Contrastive(), num_batches=2)
    assert report.causes == [], str(report)
    assert any("is not the mean of its rows' losses" in told for told in report.unseen), str(report)


# ---- what is trained ----


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
