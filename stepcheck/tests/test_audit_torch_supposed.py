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


PARTS = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""
PAIRED = f"""{PARTS}
x, y = torch.randn(60, 4), torch.arange(60) * 7 % 2
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batches(x, y):
    order = torch.randperm(60)
    x, y = x[order], y[order]
    for start in range(0, 60, 15):
        yield x[start : start + 15], y[start : start + 15].float()
for epoch in range(4):
    for some, labels in batches(x, y):
        out = model(some)[:, 0]
        loss = (F.softplus(out) - out * labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
CLASSES = f"""{PARTS}
x, y = torch.randn(120, 4), (torch.arange(120) % 12 == 0).long()
weights = 120 / torch.bincount(y)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for rows in torch.randperm(120).split(40):
        nll = -model(x[rows]).log_softmax(1).gather(1, y[rows][:, None])[:, 0]
        loss = (weights[y[rows]] * nll).sum() / weights[y[rows]].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TOKENS = f"""{PARTS}
def batch(n):
    return nn.utils.rnn.pad_sequence([torch.randint(1, 9, (3 + 5 * i % n,)) for i in range(8)], batch_first=True)
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(12):
    parts = [batch(7 + update), batch(13)]
    count = sum((part[:, 1:] != 0).sum() for part in parts)
    optimizer.zero_grad()
    for part in parts:
        inputs, y = part[:, :-1], part[:, 1:]
        nll = -model(inputs).log_softmax(-1).gather(-1, y[..., None])[..., 0]
        ((nll * (y != 0)).sum() / count).backward()
    optimizer.step()
"""
STATEFUL = f"""{PARTS}
x, y = torch.randn(64, 5, 3), torch.randn(64)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)
    def forward(self, x, state=None):
        out, state = self.rnn(x, state)
        return self.head(out[:, -1])[:, 0], state
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    state = None
    for rows in torch.arange(64).split(16):
        out, state = model(x[rows], state)
        loss = F.mse_loss(out, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()
"""
LATE = f"""{PARTS}
x, y = torch.randn(60, 4), torch.arange(60) % 3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
for stage in range(2):
    if stage:
        model[2] = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(10):
        for rows in torch.randperm(60).split(15):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
"""
DROPPING = f"""{PARTS}
x, y = torch.randn(60, 4), torch.arange(60) % 3
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.3, training=self.training))
model = Net(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x)
"""
STAGES = f"""{PARTS}
x, y = torch.randn(60, 4), torch.arange(60) % 3
first, second = nn.Linear(4, 3), nn.Linear(4, 3)
for model in (first, second):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(20):
        for rows in torch.randperm(60).split(15):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
"""
SCALED = f"""{PARTS}
X = torch.randn(90, 4)
y = X.sum(1) * 5 + 14
x, target = X[:60], (y[:60] - y.mean()) / y.std()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        F.mse_loss(model(x[rows])[:, 0], target[rows]).backward()
        optimizer.step()
"""
COPIED = f"""{PARTS}
x = torch.randint(1, 9, (60, 6))
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows])[:, :-1].reshape(-1, 9), x[rows][:, 1:].reshape(-1)).backward()
        optimizer.step()
"""
ROWS = f"""{PARTS}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(3, 8, batch_first=True), nn.BatchNorm1d(8), nn.Linear(8, 2)
    def forward(self, x):
        states, _ = self.lstm(x)
        shares = (9 * states.sum(2, keepdim=True)).softmax(1)
        return self.head(self.norm((shares * states).sum(1)))

x, y, model = torch.randn(60, 5, 3), torch.arange(60) % 2, Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
"""
SINGLE = f"""{PARTS}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)
    def forward(self, x):
        return torch.sigmoid(self.body(x))[:, 0]

x, y, model = torch.randn(60, 4), (torch.arange(60) % 2).float(), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        F.binary_cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
"""
SEEN = {  # the right script, the edits that make the fault, the words for it
    "apart": (PAIRED, (("x, y = x[order], y[order]", "x = x[order]"),), "The loss gets the labels of y, but in "),
    "frequent": (CLASSES, (("120 / torch.bincount(y)", "torch.bincount(y) / 120"),), "The weight of a class grows"),
    "own tokens": (TOKENS, (("/ count)", "/ (y != 0).sum() / 2)"),), "Mean of means"),
    "state": (STATEFUL, (("torch.arange(64)", "torch.randperm(64)"),), "The state that the model returns"),
    "late head": (
        LATE,
        (
            ("    if stage:\n        model[2] = nn.Linear(8, 3)\n", ""),
            ("    for epoch", "    if stage:\n        model[2] = nn.Linear(8, 3)\n    for epoch"),
        ),
        "2.weight, 2.bias were set after the optimizer was made",
    ),
    "dropout": (DROPPING, ((", training=self.training", ""),), "`F.dropout` drops numbers after `eval()` too"),
    "second stage": (
        STAGES,
        (("F.cross_entropy(model(x[rows])", "F.cross_entropy(model(x[rows]).softmax(1)"),),
        "is a softmax too many",
    ),
    "scaled": (SCALED, (("target[rows])", "target[rows].roll(1))"),), ""),
    "copied": (
        COPIED,
        (("[:, :-1].reshape", ".reshape"), ("[:, 1:].reshape", ".reshape")),
        "The labels are the inputs",
    ),
    "no mask": (
        COPIED,
        (("nn.Linear(8, 9))", "nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.Linear(8, 9))"),),
        "outputs depend on later places: the model sees what it is to predict",
    ),
    "rows for time": (
        ROWS,
        (("nn.LSTM(3, 8, batch_first=True)", "nn.LSTM(3, 8)"),),
        "The output of a row depends on the other rows of its batch, in inference too",
    ),
    "one softmax": (
        SINGLE,
        (("torch.sigmoid(self.body(x))", "torch.softmax(self.body(x), 1)"),),
        "All outputs are 1, in every row of every update",
    ),
    "shares of rows": (ROWS, ((".softmax(1)", ".softmax(0)"),), "The output of a row depends on the other rows"),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_fault_beside_the_loss_is_seen_and_its_right_twin_is_clean(name, audit):
    text, edits, told = SEEN[name]
    code, out, _ = audit(text)
    assert (code, "Nothing found in " in out) == (0, True), out
    for edit in edits:
        assert edit[0] in text
        text = text.replace(*edit)
    code, out, _ = audit(text)
    assert told in out
    assert code == 1 or not told, out


def test_functions_of_torch_func_are_not_disturbed(audit):
    code, out, _ = audit(f"""{PARTS}
x, y, model = torch.randn(60, 4), torch.arange(60) % 3, nn.Linear(4, 3)
weights = dict(model.named_parameters())
def loss(weights):
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
for update in range(9):
    grads = torch.func.grad(loss)(weights)
    weights = {{name: (p - 0.1 * grads[name]).detach() for name, p in weights.items()}}
print("the end")
""")
    assert code == 2
    assert "the end" in out
    assert "functions of `torch.func` call" in out


def test_a_sum_over_all_places_that_is_divided_by_the_others_is_said(audit):
    whole = "((nll * (y != 0)).sum() / count)"
    assert whole in TOKENS
    code, out, _ = audit(TOKENS.replace(whole, "(nll.sum() / sum((part[:, :-1] != 0).sum() for part in parts))"))
    assert (code, out.startswith("The loss counts the padding: ")) == (1, True), out


def test_dropout_that_is_said_to_stay_on_is_no_fault(audit):
    code, out, _ = audit(DROPPING.replace("training=self.training", "training=True"))
    assert (code, "Nothing found in " in out) == (0, True), out
