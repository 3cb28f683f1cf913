"""Plain loops of PyTorch: right ones, and the same with a fault."""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)  # other tests run beside
NUM, SIZE = 22, 4  # rows, and rows of a batch: the last one of a pass is short


def regression():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(NUM, 3)).astype("float32")
    return torch.tensor(x), torch.tensor((x @ [1.0, -2.0, 3.0] + draw.normal(size=NUM)).astype("float32"))


def classification():
    x, y = regression()
    return x, torch.bucketize(y, torch.tensor([-1.0, 1.0]))


def mlp(width=1, *more):
    torch.manual_seed(1)
    first = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(6, width), *more)


def plain(width=1):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, width))


@dataclass
class Loop:
    """A loop; with the names of faults it has these.

    `window`: microbatches of an update.
    """

    faults: tuple[str, ...] = ()
    of_classes: bool = False
    window: int = 1
    epochs: int = 3
    clip: float = 0.0
    model: object = None
    loss: object = None
    optimizer: object = torch.optim.SGD
    options: dict = field(default_factory=lambda: {"lr": 0.05})
    schedule: bool = False
    shown: list = field(default_factory=list)

    def __post_init__(self):
        self.x, self.y = classification() if self.of_classes else regression()
        make = self.model or mlp
        self.model = make(3 if self.of_classes else 1)
        self.loss = self.loss or (nn.CrossEntropyLoss() if self.of_classes else nn.MSELoss())

    def orders(self):
        """Yield the order of the rows in each epoch."""
        torch.manual_seed(7)
        once = torch.randperm(NUM)
        for _ in range(self.epochs):
            order = torch.randperm(NUM)
            order = once if "same order" in self.faults else order
            yield torch.arange(NUM) if "in the order of the data" in self.faults else order

    def train(self):
        has, model = self.faults.__contains__, self.model
        parameters = [*model.parameters()][: -2 if has("layer left out") else None]
        parameters = copy.deepcopy(parameters) if has("optimizer of a copy") else parameters
        optimizer = self.optimizer(parameters, **self.options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if self.schedule else None
        if has("eval"):
            model.eval()
        else:
            model.train()
        for order in self.orders():
            if not has("eval") and not has("train once"):
                model.train()
            if has("optimizer in each epoch"):
                optimizer = self.optimizer(parameters, **self.options)
            self.epoch(list(order.split(SIZE)), optimizer, scheduler)
            if not has("evaluated in training mode"):
                model.eval()
            with torch.no_grad():
                model(self.x)
        return model

    def epoch(self, batches, optimizer, scheduler):
        has, model, k = self.faults.__contains__, self.model, self.window
        optimizer.zero_grad()
        total, last = 0.0, 0.0
        for i, rows in enumerate(batches):
            if has("zeroed in every microbatch"):
                optimizer.zero_grad()
            if has("seeded in each batch"):
                torch.manual_seed(0)
            out = model(self.x[rows])
            loss = self.of(out, rows)
            window = batches[i - i % k : i - i % k + k]
            if k > 1 and not has("never divided"):
                num = sum(map(len, window))
                loss = (
                    loss / (k if has("full window") else len(window))
                    if has("mean of means") or has("full window")
                    else loss * len(rows) / num
                )
            if has("step first"):
                optimizer.step()
                optimizer.zero_grad()
            loss = torch.tensor(loss.item(), requires_grad=True) if has("cut off") else loss
            loss.backward()
            if has("zeroed before the step"):
                optimizer.zero_grad()
            total, last = total + self.of(out.detach(), rows).item() * len(rows), self.of(out.detach(), rows).item()
            if has("clip per microbatch"):
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if scheduler and has("schedule per microbatch"):
                scheduler.step()
            if has("no step"):
                continue
            is_due = (i + 1) % k == 0 or (i + 1 == len(batches) and not has("last window dropped"))
            if not is_due or has("step first"):
                continue
            if self.clip and not (has("clip per microbatch") or has("clip after the step")):
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if scheduler and has("schedule first"):
                scheduler.step()
            optimizer.step()
            if has("clip after the step"):
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if has("twice"):
                optimizer.step()
            if has("decay by hand"):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.99)
            if not has("never zeroed"):
                optimizer.zero_grad()
            if scheduler and not (has("schedule per microbatch") or has("schedule first")):
                scheduler.step()
        self.shown.append(last if has("prints the last batch") else total / NUM)

    def of(self, out, rows):
        """Return the loss of a batch."""
        has, y = self.faults.__contains__, self.y[rows]
        if has("labels shifted"):
            y = self.y[(rows + 1) % NUM]
        if has("labels shuffled"):
            y = self.y[torch.tensor(np.random.default_rng(int(rows[0])).permutation(NUM))[rows]]
        if self.of_classes:
            out = functional.softmax(out, dim=1) if has("softmax") else out
        elif not has("broadcast"):
            out = out.squeeze(-1)
        if has("penalty by hand"):
            return self.loss(out, y) + 0.02 * sum(p.square().sum() for p in self.model.parameters())
        if has("summed"):
            return self.loss(out, y) * len(y)
        return self.loss(out, y)
