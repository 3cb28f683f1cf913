"""Sharpness-aware minimisation as an optimizer

kind: right
engine: torch
author: suite
says: Its step moves the weights, calls the closure, and moves them back.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn


class Sharpness(torch.optim.Optimizer):
    def __init__(self, params, size, **given):
        super().__init__(params, given)
        self.inner, self.size = torch.optim.SGD(self.param_groups, **given), size

    @torch.no_grad()
    def step(self, closure):
        moved = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in moved]
        for p in moved:
            p.add_(self.size * p.grad)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(moved, before):
            p.copy_(old)
        self.inner.step()
        self.zero_grad()


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = Sharpness(model.parameters(), 0.05, lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):

        def closure():
            out = model(X[rows])
            loss = criterion(out, CLASSES[rows])
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
    print(epoch, loss.item())
