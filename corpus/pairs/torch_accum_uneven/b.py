from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    epochs: int = 3
    batch: int = 24
    micro: int = 7
    lr: float = 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.loss_fn = nn.CrossEntropyLoss(reduction="sum")
        self.opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-3)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=15)

    def update(self, xb, yb):
        """One update on a whole batch, in microbatches that fit into memory."""
        total = 0.0
        for xm, ym in zip(xb.split(self.cfg.micro), yb.split(self.cfg.micro)):
            loss = self.loss_fn(self.model(xm), ym) / len(xb)
            loss.backward()
            total += loss.item()
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)
        self.sched.step()
        return total

    def fit(self, x, y, generator):
        for epoch in range(self.cfg.epochs):
            perm = torch.randperm(len(x), generator=generator)
            xs, ys = x[perm], y[perm]
            for i in range(0, len(xs), self.cfg.batch):
                loss = self.update(xs[i:i + self.cfg.batch], ys[i:i + self.cfg.batch])
            print(f"epoch {epoch} loss {loss:.5f}")


def make_data():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(100, 12, generator=g)
    w = torch.randn(12, 5, generator=g)
    y = (x @ w + 0.3 * torch.randn(100, 5, generator=g)).argmax(1)
    return x, y


def main():
    torch.manual_seed(0)
    model = Net()
    x, y = make_data()
    Trainer(model, Config()).fit(x, y, torch.Generator().manual_seed(5))
    return model


if __name__ == "__main__":
    main()
