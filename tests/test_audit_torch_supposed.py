"""Losses written by hand on PyTorch are solved for, from their derivative by the module's output."""

from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(60, 4)
kind, value = torch.arange(60) * 7 % 3, x[:, :1] * 2 + 0.3
share, kept = torch.rand(60), (torch.rand(60, 5) < 0.7).float()
teacher, path = torch.randn(60, 3), torch.randn(60, 5)
model = nn.Sequential(nn.Linear({width}, 8), nn.Tanh(), nn.Linear(8, {outputs}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{function}
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        loss = {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def script(loss, outputs, function="", width=4):
    """Return a script that trains a small module by a loss, which is computed of its `rows`."""
    return HEAD.format(loss=loss, outputs=outputs, function=function, width=width)


LOGS = "logs = lambda out, axis=1: out - out.logsumexp(axis, keepdim=True)"
DIFFUSION = """
def denoising(model, x):
    noise, t = torch.randn_like(x), torch.rand(len(x), 1)
    return (model(torch.cat([(1 - t) * x + t * noise, t], 1)) - noise).square().mean()
"""
Q = """
def of_actions(model, x):
    actions, target = torch.randint(3, (len(x), 1)), x.sum(1)
    return (model(x).gather(1, actions)[:, 0] - target).square().mean()
"""
FOUND = {  # the loss in the report; the script
    "CrossEntropyLoss of kind as labels": script("-logs(model(x[rows]))[torch.arange(15), kind[rows]].mean()", 3, LOGS),
    "MSELoss of value as labels": script("((model(x[rows]) - value[rows]) ** 2).mean()", 1),
    "L1Loss of value as labels": script("(model(x[rows]) - value[rows]).abs().sum() / len(rows)", 1),
    "CrossEntropyLoss of kind as labels by the weights share": script(
        "-(share[rows] * logs(model(x[rows]))[torch.arange(15), kind[rows]]).sum() / share[rows].sum()", 3, LOGS
    ),
    "MSELoss of the inputs as labels": script("(model(x[rows]) - x[rows]).pow(2).mean()", 4),
    "MSELoss of noise as labels": script("denoising(model, x[rows])", 4, DIFFUSION, 5),
    "MSELoss of target as labels, by one output of each row": script("of_actions(model, x[rows])", 3, Q),
    "0.4 times the cross entropy of kind, and 2.4 times that of the softmax of teacher / 2 by the outputs / 2": script(
        "(lambda out: -0.4 * logs(out)[torch.arange(15), kind[rows]].mean()"
        "- 2.4 * (logs(out / 2) * (teacher[rows] / 2).softmax(1)).sum(1).mean())(model(x[rows]))",
        3,
        LOGS,
    ),
}


@pytest.mark.parametrize("told", FOUND)
def test_a_right_loss_by_hand_is_found_and_its_loop_is_clean(told, audit):
    code, out, _ = audit(FOUND[told])
    assert (code, "Nothing found in 16 updates: " in out, "Is that meant?" in out) == (0, True, False), out
    assert f"loss: {told}, supposed from the gradients" in out


WRONG = {  # what the report says; the script
    "The labels are those of the row before in the batch": script(
        "((model(x[rows]) - value[rows].roll(1, 0)) ** 2).mean()", 1
    ),
    "of other classes than kind has": script(
        "-logs(model(x[rows]))[torch.arange(15), kind[torch.randperm(60)[:15]]].mean()", 3, LOGS
    ),
    "The softmax is taken over the rows of the batch": script(
        "-logs(model(x[rows]), 0)[torch.arange(15), kind[rows]].mean()", 3, LOGS
    ),
    "That is 1 / 3, the number of classes": script(
        "-(logs(model(x[rows])) * nn.functional.one_hot(kind[rows], 3)).mean()", 3, LOGS
    ),
    "one temperature is meant for both": script(
        "(lambda out: -(logs(out) * (teacher[rows] / 4).softmax(1)).sum(1).mean()"
        "- logs(out)[torch.arange(15), kind[rows]].mean())(model(x[rows]))",
        3,
        LOGS,
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_a_wrong_loss_by_hand_is_explained(told, audit):
    code, out, _ = audit(WRONG[told])
    assert code != 0, out
    assert told in out
