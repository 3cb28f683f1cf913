"""A small loop of PyTorch with all that loops often have, and what is left after it."""

import copy
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import stepcheck

torch.set_num_threads(1)  # other tests run beside
NUM, SIZE = 22, 4  # rows, and rows of a batch: the last one of a pass is short
_draw = torch.Generator().manual_seed(0)
X = torch.randn(NUM, 3, generator=_draw)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(
    NUM, 1, generator=_draw
)
CLASSES = torch.randint(0, 4, (NUM,), generator=_draw)
TEXT = torch.randint(0, 10, (NUM, 7), generator=_draw)
MSE, CROSS = nn.MSELoss(), nn.CrossEntropyLoss()


def seeded():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def network(width=4, *more):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), *more, nn.Linear(6, width))


def usual(
    model,
    fault="",
    *,
    of=lambda out: out,
    value=CROSS,
    x=X,
    y=CLASSES,
    num=3,
    **given,
):
    """Return the report on a loop that minimises a value of what `of` makes of outputs, with a fault or without."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def train():
        for rows in batches(num):
            if fault != "not_zeroed":
                optimizer.zero_grad()
            labels = y[(rows + 1) % NUM] if fault == "shifted" else y[rows]
            out = of(model(x[rows]))
            value(
                out.softmax(1) if fault == "softmax" else out, labels
            ).backward()
            optimizer.step()

    return watched(model, train, **given)


def steps(model, num=3):
    """Train, without a fault."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for rows in batches(num):
        optimizer.zero_grad()
        CROSS(model(X[rows]), CLASSES[rows]).backward()
        optimizer.step()


def batches(num=3):
    for _ in range(num):
        yield from torch.randperm(NUM).split(SIZE)


def watched(model, train, data=(X, CLASSES), loss=CROSS, **intention):
    """Return the report on a loop."""
    with stepcheck.watch(model, data, loss, **intention) as report:
        train()
    return checked(report)


def checked(report):
    """Return a report of which no stage has failed."""
    assert report.as_json()["failures"] == {}
    return report


def faults(report):
    return [found.fault for found in report.findings]


def reasons(report):
    return [each.reason for each in report.unjudged]


@dataclass
class Session:
    """A loop of updates of `window` microbatches with dropout and statistics; the fault is one of its names."""

    fault: str = ""
    window: int = 1
    clip: float = 0.0
    casts: bool = False
    make: type = torch.optim.SGD
    has_schedule: bool = False
    is_compiled: bool = False
    printed: list[float] = field(default_factory=list)

    def __post_init__(self):
        seeded()
        self.model = network(4, nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.called = (
            torch.compile(self.model, backend="eager")
            if self.is_compiled
            else self.model
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.casts)

    def train(self):
        self.optimizer = self.make(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: 1 / (1 + n)
        )
        for _ in range(2):
            self.model.train()
            parts = torch.randperm(NUM).split(SIZE)
            for start in range(0, len(parts), self.window):
                self.update(parts[start : start + self.window])
            self.model.eval()
            with torch.no_grad():
                self.printed.append(CROSS(self.called(X), CLASSES).item())

    def update(self, window):
        num = sum(map(len, window))
        for rows in window:
            if self.fault == "eval":
                self.model.eval()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
                loss = CROSS(self.called(X[rows]), CLASSES[rows])
            share = (
                1 / len(window) if self.fault == "means" else len(rows) / num
            )
            self.scaler.scale(loss * share).backward()
            if self.fault == "clips each":
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.unscale_(self.optimizer)
        if self.clip and self.fault != "clips each":
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.fault != "not zeroed":
            self.optimizer.zero_grad()
        if self.has_schedule:
            self.scheduler.step()

    def state(self):
        """Return all that training leaves."""
        model = self.model
        return {
            "values": {
                name: value.clone()
                for name, value in model.state_dict().items()
            },
            "grads": [
                None if p.grad is None else p.grad.clone()
                for p in model.parameters()
            ],
            "modes": [part.training for part in model.modules()],
            "trained": [p.requires_grad for p in model.parameters()],
            "names": [sorted(vars(part)) for part in model.modules()],
            "hooks": [
                len(held)
                for part in model.modules()
                for n, held in vars(part).items()
                if "hooks" in n
            ],
            "slots": copy.deepcopy(self.optimizer.state_dict()),
            "scale": self.scaler.state_dict(),
            "rate": self.scheduler.get_last_lr(),
            "random": (
                torch.get_rng_state(),
                np.random.get_state()[1],
                random.getstate(),
            ),
            "printed": [*self.printed],
        }


def equal(one, two):
    """Whether two values are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(
            equal(one[key], two[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(np.array_equal(np.asarray(one), np.asarray(two))) and type(
        one
    ) is type(two)
