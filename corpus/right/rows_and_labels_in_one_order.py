"""Rows and labels in one order, by a generator

kind: right
engine: torch
author: suite
says: Each pass draws an order for both.
call: model, data=(x, y.float()), loss=nn.BCEWithLogitsLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


def batches(x, y):
    order = torch.randperm(60)
    x, y = x[order], y[order]
    for start in range(0, 60, 15):
        yield x[start : start + 15], y[start : start + 15].float()


torch.manual_seed(1)
x, y = torch.randn(60, 4), torch.arange(60) * 7 % 2
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for some, labels in batches(x, y):
        out = model(some)[:, 0]
        loss = (F.softplus(out) - out * labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
