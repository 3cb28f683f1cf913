"""The audit of PyTorch by observations alone: scripts with a fault, and right ones that seem to have one."""

import json
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
TEXT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(60, 4)
y = (x[:, 0] + 0.1 * torch.randn(60) > 0.9).long()
class Drop(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2, training=self.training)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.more = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 2)
        self.drop = Drop()
        self.bodies = [self.body]  # known by another name
    def forward(self, x):
        h = self.body(x)
        for layer in self.more:
            h = layer(h)
        return self.head(self.drop(h))
model = Model()
def made():
    vectors = [p for p in model.parameters() if p.ndim < 2]
    others = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.Adam([{"params": others, "weight_decay": 0.1}, {"params": vectors}], 1e-2)
optimizer, criterion = made(), nn.CrossEntropyLoss(torch.tensor([1.0, 4.0]))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
for epoch in range(4):
    model.train()
    for i, rows in enumerate(torch.randperm(60).split(10)):
        optimizer.zero_grad()
        out = model(x[rows])
        loss = criterion(out, y[rows])
        shown = F.mse_loss(out.detach(), x[rows, :2])
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        plateau.step((0.5 + 0.02 * epoch))
"""
BINARY = "F.binary_cross_entropy_with_logits(out[:, 0], y[rows].float(){})"
TRAIN, STEP, HEAD = (
    "    model.train()\n",
    "        optimizer.step()\n        scheduler.step()\n",
    "self.head(self.drop(h))",
)
FROZEN = "model = Model()", "model = Model()\nfor p in model.body.parameters(): p.requires_grad_(False)"
FAULTS = {  # edits that make the fault, and the words with which the report begins
    "hidden": (
        [("nn.ModuleList([nn.Linear(8, 8)])", "[nn.Linear(8, 8)]")],
        "`Model.more` is a plain list (",
    ),
    "dropout": (
        [("training=self.training", "training=not self.training")],
        "`F.dropout` is called with training=False",
    ),
    "sigmoid": (
        [(HEAD, f"torch.sigmoid({HEAD})"), ("criterion(out, y[rows])", BINARY.format(""))],
        "BCEWithLogitsLoss takes logits, and gets the outputs of a sigmoid",
    ),
    "softmax": (
        [(HEAD, f"torch.softmax({HEAD}, -1)")],
        "CrossEntropyLoss takes logits, and gets numbers that add up to 1: is a softmax too many? Let the model return",
    ),
    "weights": (
        [("[1.0, 4.0]", "[4.0, 1.0]")],
        "The more labels a class has, the larger is its weight in the loss: 4, 1",
    ),
    "positive": (
        [("criterion(out, y[rows])", BINARY.format(", pos_weight=torch.tensor(0.25)"))],
        "The more labels a class has, the larger is its weight in the loss: 1, 0.25",
    ),
    "cosine": ([("optimizer, 36", "optimizer, 6")], "CosineAnnealingLR makes a step in each update, 24 of them"),
    "plateau": ([('"max", patience=0', '"min", patience=0')], "ReduceLROnPlateau has cut the learning rate while"),
    "decayed": (
        [
            ("if p.ndim < 2", "if p.ndim < 2 and p is not model.body[1].weight"),
            ("if p.ndim > 1]", "if p.ndim > 1 or p is model.body[1].weight]  # no 'layer_norm'"),
        ],
        "1 parameter of normalisation layers decay, while a group of the same optimizer",
    ),
    "unconnected": (
        [("loss.backward", "(loss + 0.5 * shown).backward")],
        "`F.mse_loss` gets numbers that were cut off from the model",
    ),
    "short": (
        [
            ("        scheduler.step()\n", ""),
            ("    model.eval()\n", "    scheduler.step()\n    model.eval()\n"),
            ("CosineAnnealingLR(optimizer, 36)", "OneCycleLR(optimizer, 1e-2, total_steps=24)"),
        ],
        "OneCycleLR makes 4 steps in 24 updates, and its total_steps is that of the updates (",
    ),
    "idle": (
        [
            ("scheduler = ", "other = torch.optim.SGD(model.head.parameters(), 0.1)\nscheduler = "),
            ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        other.zero_grad()\n"),
            ("if p.ndim < 2", "if p.ndim < 2 and p is not model.head.bias"),
            ("if p.ndim > 1", "if p.ndim > 1 and p is not model.head.weight"),
        ],
        "SGD sets the gradients of head.weight, head.bias to zero, and makes no step",
    ),
    "drift": ([FROZEN], "The running statistics of `body.1` move, although all weights up to there are frozen"),
}
PROVEN = {  # with a known loss the numbers prove a fault: edits, the cause, and the words of the note that is left out
    "anew": ([(TRAIN, f"{TRAIN}    optimizer = made()\n")], "Optimizer re-created.", "with the same parameters"),
    "thrown": (
        [(STEP, f"        if i % 3 < 2: continue\n{STEP}")],
        "Only the last microbatch.",
        "are set to zero before",
    ),
}
ON_PURPOSE = {  # edits that look like a fault
    "frozen in eval mode": [FROZEN, (TRAIN, f"{TRAIN}    model.body.eval()\n")],
    "dropout of a part in eval mode": [(TRAIN, f"{TRAIN}    model.drop.eval()\n")],
    "MC dropout": [("training=self.training", "training=True")],
    "warm restarts": [("CosineAnnealingLR(optimizer, 36)", "CosineAnnealingWarmRestarts(optimizer, 6)")],
    "cosine by epochs": [
        ("        scheduler.step()\n", ""),
        ("    model.eval()\n", "    scheduler.step()\n    model.eval()\n"),
        ("optimizer, 36", "optimizer, 6"),
    ],
    "falling accuracy": [("0.5 + 0.02", "0.5 - 0.02")],
    "rising loss": [('"max"', '"min"'), ("0.5 + 0.02 * epoch", "0.5 + 0.0217391 * epoch ** 1.3")],
    "attacked": [
        (
            "        out = model(x[rows])\n",
            "        given = x[rows].requires_grad_()\n"
            "        F.cross_entropy(model(given), y[rows]).backward()\n"
            "        optimizer.zero_grad()\n"
            "        out = model((given + 0.01 * given.grad.sign()).detach())\n",
        ),
    ],
    "even weights": [("[1.0, 4.0]", "[1.0, 1.0]")],
}


def edited(edits):
    text = TEXT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_right_script_is_quiet(audit):
    code, out, _ = audit(TEXT)
    assert (code, "Nothing found in" in out.splitlines()[0]) == (0, True), out


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, audit):
    edits, told = FAULTS[name]
    code, out, _ = audit(edited(edits))
    assert (code, out[: len(told)]) == (1, told), out
    assert "one by one" not in out


@pytest.mark.parametrize("name", PROVEN)
def test_a_proven_fault_is_said_once(name, audit):
    edits, cause, note = PROVEN[name]
    code, out, _ = audit(edited(edits))
    assert (code, out[: len(cause)], note in out) == (1, cause, False), out


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_what_is_done_on_purpose_is_no_fault(name, audit):
    code, out, _ = audit(edited(ON_PURPOSE[name]))
    assert code != 1, out
    assert "one by one" not in out


TWO = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(60, 4)
G, D = nn.Linear(2, 4), nn.Linear(4, 1)
for_g, for_d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
def of(out, label):
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, label))
def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for epoch in range(5):
    for rows in torch.randperm(60).split(10):
        fake = G(torch.randn(10, 2))
        update(for_g, of(D(fake), 1.0))
        noisy = x[rows].requires_grad_()
        (slope,) = torch.autograd.grad(D(noisy).sum(), noisy, create_graph=True)
        update(for_d, of(D(x[rows]), 1.0) + of(D(fake.detach()), 0.0) + slope.square().mean())
"""


def test_gradients_that_another_module_s_backward_leaves_are_no_fault_if_they_are_cleared(audit):
    code, out, _ = audit(TWO)
    assert code == 2, out
    code, out, _ = audit(TWO.replace("    optimizer.zero_grad()", "    if optimizer is for_g: optimizer.zero_grad()"))
    assert (code, "The gradients that an optimizer step has used are still there" in out) == (1, True), out
    assert "module: D" in out.split("\n\n")[1], out


SHARP = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(60, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def backward(rows):
    optimizer.zero_grad()
    (model(x[rows]) - x[rows, :1]).square().mean().backward()
for epoch in range(5):
    for rows in torch.randperm(60).split(10):
        {}
"""
FUNCTIONS = """
@torch.no_grad()
def moved(sign):
    for p, d in zip(model.parameters(), directions):
        p.add_(d, alpha=sign)
def with_perturbation(rows):
    global directions
    backward(rows)
    directions = [0.05 * p.grad for p in model.parameters()]
    moved(1)
    backward(rows)
    moved(-1)
    optimizer.step()
def of_both(rows):
    parts = []
    for half in rows.split(5):
        backward(half)
        parts.append([p.grad.clone() for p in model.parameters()])
    for p, a, b in zip(model.parameters(), *parts):
        p.grad = (a + b) / 2
    optimizer.step()
"""


@pytest.mark.parametrize("call", ["with_perturbation", "of_both"])
def test_gradients_that_are_read_are_not_thrown_away(call, audit):
    text = SHARP.format(f"{call}(rows)").replace("for epoch", f"{FUNCTIONS}\nfor epoch")
    _, out, _ = audit(text)
    assert "are set to zero before" not in out, out
    code, out, _ = audit(SHARP.format("backward(rows); backward(rows); optimizer.step()"))
    assert (code, out.startswith("The gradients of ")) == (1, True), out


DISTRIBUTION = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(60, 4)
class Model(nn.Linear):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)
model = Model(4, 1)
made = lambda: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
optimizer = made()
for epoch in range(5):
    {}
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        (-model(x[rows]).log_prob(x[rows, :1]).mean()).backward()
        optimizer.step()
"""


def test_a_distribution_is_an_output_of_its_parameters(audit):
    code, out, _ = audit(DISTRIBUTION.format("optimizer = made()"))
    assert (code, out.startswith("Optimizer re-created.")) == (1, True), out


@pytest.mark.parametrize("line", ["pass", "nn.init.normal_(model.weight); optimizer = made()", "optimizer = made()"])
def test_an_optimizer_is_made_anew_where_no_pass_can_be_judged(line, audit):
    hidden = "type('Hidden', (), {'log_prob': torch.distributions.Normal(super().forward(x), 1.0).log_prob})"
    text = DISTRIBUTION.replace("torch.distributions.Normal(super().forward(x), 1.0)", hidden)
    code, out, _ = audit(text.replace("    {}\n", f"    {line}\n"))
    is_fault = line == "optimizer = made()"
    assert (code, out.startswith("SGD is made anew 4 times with the same parameters")) == (1 + (not is_fault), is_fault)


PLACES = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
y = torch.randint(1, 9, (48, 6)) * (torch.arange(6) < torch.randint(2, 7, (48, 1)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
    def forward(self, x, labels=None):
        out = self.head(self.table(x))
        y = F.pad(labels[:, {0}:], (0, {0}), value=-100)
        return out, F.cross_entropy(out.movedim(-1, 1), y{1})
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for rows in torch.randperm(48).split(8):
        optimizer.zero_grad()
        model(y[rows], labels=y[rows])[1].backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "given", ["out.reshape(-1, 9), y.reshape(-1)", "out.movedim(1, 0).flatten(0, 1), y.T.flatten()"]
)
def test_padded_labels_that_are_made_flat_are_said(given, audit):
    for more, is_wrong in (("", True), (", ignore_index=0", False)):
        code, out, _ = audit(PLACES.format(0, more).replace("out.movedim(-1, 1), y", given))
        assert (code == 1, out.startswith("All rows of labels end with zeros")) == (is_wrong, is_wrong), out


def test_labels_that_are_moved_twice_or_padded_are_said(audit):
    code, out, _ = audit(PLACES.format(2, "").replace("randint(2, 7", "randint(7, 8"))
    assert (code, out.startswith("The model is trained to predict the place after the next one")) == (1, True), out
    code, out, _ = audit(PLACES.format(0, ""))
    assert (code, out.startswith("All rows of labels end with zeros")) == (1, True), out
    for right in (PLACES.format(1, "").replace("randint(2, 7", "randint(7, 8"), PLACES.format(0, ", ignore_index=0")):
        code, out, _ = audit(right)
        assert code != 1, out


BY_HAND = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(60, 4)
y = (x[:, 0] > 0).long()
class Net:
    def __init__(self):
        self.w, self.b = torch.randn(2, 4).requires_grad_(), torch.zeros(2, requires_grad=True)
    def scores(self, x):
        return F.linear(x, self.w, self.b)
net = Net()
optimizer = torch.optim.SGD([net.w, net.b], 0.1)
for epoch in range(3):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        F.cross_entropy({}(net.scores(x[rows])), y[rows]).backward()
        optimizer.step()
"""


def test_a_script_without_a_module_is_heard_too(audit):
    code, out, _ = audit(BY_HAND.format("nn.Softmax(-1)"))
    assert (code, out.startswith("CrossEntropyLoss takes logits, and gets")) == (1, True), out
    assert "The audit could not see enough" in out
    code, out, _ = audit(BY_HAND.format("nn.Softmax(-1)"), "--json")
    assert (code, [note[:16] for note in json.loads(out)["notes"]]) == (1, ["CrossEntropyLoss"])
    code, out, _ = audit(BY_HAND.format(""))
    assert (code, out.startswith("The audit could not see enough")) == (2, True), out


ONE = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(60, 4)
y = x[:, 0] - x[:, 1]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def unscale():
    for p in model.parameters():
        p.grad /= 512.0
def clip():
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
for epoch in range(3):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        out, target = model(x[rows]), y[rows]
        {}
        optimizer.step()
"""
SEEN = {  # the lines between the output and the step: the right ones, the wrong ones, the note
    "broadcast": (
        "(out.squeeze(-1) - target).square().mean().backward()",
        "F.softplus(out - target).mean().backward()",
        "In the loss, outputs of shape (10, 1) or (10,) meet",
    ),
    "pairs": (
        "((out - out.T) - (target[:, None] - target)).square().mean().backward()",
        "(target - 2 * out).abs().sum().backward()",
        "In the loss, outputs of shape (10, 1) or (10,) meet",
    ),
    "against a sum over one axis": (
        "(out.squeeze(-1) + (target < target[:, None]).log()).logsumexp(1).mean().backward()",
        "(out.squeeze(-1) * target[:, None]).exp().mean().backward()",
        "In the loss, outputs of shape (10, 1) or (10,) meet",
    ),
    "a table of weights": (
        "(out.squeeze(-1).exp() * (target < target[:, None])).mean().backward()",
        "(out * target).exp().mean().backward()",
        "In the loss, outputs of shape (10, 1) or (10,) meet",
    ),
    "clip": (
        "((out[:, 0] - target).square().mean() * 512.0).backward(); unscale(); clip()",
        "((out[:, 0] - target).square().mean() * 512.0).backward(); clip(); unscale()",
        "The gradients are clipped (",
    ),
    "probabilities": (
        "F.kl_div(F.log_softmax(out * x[rows], -1), F.softmax(target, 0)[:, None], reduction='sum').backward()",
        "F.kl_div(F.softmax(out * x[rows], -1), F.softmax(target, 0)[:, None], reduction='sum').backward()",
        "`kl_div` takes log probabilities, and gets others",
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_loss_a_clip_and_their_right_twins(name, audit):
    right, wrong, told = SEEN[name]
    code, out, _ = audit(ONE.format(wrong))
    assert (code, out[: len(told)], "one by one" in out) == (1, told, False), out
    code, out, _ = audit(ONE.format(right))
    assert code != 1, out
    assert "one by one" not in out


def test_a_group_that_no_parameter_is_in(audit):
    groups = '[{"params": [*model.parameters()], "weight_decay": 0.1}, {"params": []}], 0.1'
    text = ONE.format(SEEN["broadcast"][0]).replace("model.parameters(), 0.1)\ndef", f"{groups})\ndef")
    code, out, _ = audit(text)
    assert (code, out.startswith("A group of the optimizer without weight decay has no parameters")) == (1, True), out
    code, out, _ = audit(text.replace("nn.Linear(4, 1)", "nn.Linear(4, 1, bias=False)"))
    assert code != 1, out


ATTENTION = """
import torch
from torch import nn
torch.manual_seed(0)
sizes = torch.randint(1, 6, (60, 1))
valid = torch.arange(6) < sizes
valid = {valid}
x = torch.randn(60, 6, 4) * valid[..., None]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)
    def forward(self, x, mask):
        return self.head(self.body(x, x, x, key_padding_mask=mask)[0].sum(1))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        model(x[rows], {mask}).square().mean().backward()
        optimizer.step()
"""


def test_a_mask_that_leaves_out_the_valid_places(audit):
    code, out, _ = audit(ATTENTION.format(valid="valid", mask="valid[rows]"))
    assert (code, out.startswith("`key_padding_mask` is True for the first places")) == (1, True), out
    for valid in ("valid", "~valid"):  # the first places are padding
        code, out, _ = audit(ATTENTION.format(valid=valid, mask="~valid[rows]"))
        assert code != 1, out


FUNCTIONS_BY_HAND = {  # forward, backward, and the words for it
    "square": ("x.square().mean()", "g * 2 * x / x.numel()", ""),
    "without its count": ("x.square().mean()", "g * 2 * x", "returns 10 times the derivative of `forward` by input 1"),
    "without the gradient": ("x.square().mean()", "2 * x / x.numel()", "does not use the gradient that it is given"),
    "another": ("x.exp()", "g * x", "returns another gradient than the derivative"),
    "in single precision": ("x.float().square()", "g * x", "returns 0.5"),
    "right in single precision": ("x.float().square()", "g * 2 * x", ""),
    "reversal": ("x.view_as(x)", "-g", ""),
    "straight through": ("x.round()", "g", ""),
    "straight through a clamp": ("x.clamp(-0.1, 0.1)", "g", ""),
    "ReLU": ("x.relu()", "g * (x > 0)", ""),
    "noise": ("x * torch.rand_like(x)", "g", ""),
}


@pytest.mark.parametrize("name", FUNCTIONS_BY_HAND)
def test_a_backward_pass_by_hand(name, audit):
    forward, backward, told = FUNCTIONS_BY_HAND[name]
    function = f"""
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return {forward}
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return {backward}
"""
    text = ONE.format("(0.5 * Own.apply(out[:, 0] - target)).mean().backward()")
    code, out, _ = audit(text.replace("model =", f"{function}model ="))
    assert "one by one" not in out
    if told:
        assert (code, out.startswith(f"`Own.backward` {told}")) == (1, True), out
    else:
        assert code != 1, out


LAST_WINDOW = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(70, 4)
y = x[:, 0] * 2
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for epoch in range(5):
    optimizer.zero_grad()
    for i, rows in enumerate(torch.randperm(70).split(7)):
        error = model(x[rows]).squeeze(-1) - y[rows]
        (torch.log(torch.cosh(error)).mean() / 4).backward()
        if (i + 1) % 4 == 0 or i == 9:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_last_window_of_each_pass_is_thrown_away_by_zero_grad(audit):
    code, out, _ = audit(LAST_WINDOW)
    assert code != 1, out
    code, out, _ = audit(LAST_WINDOW.replace(" or i == 9", ""))
    assert (code, "The gradients of 8 of 46 backward passes are set to zero before" in out) == (1, True), out
