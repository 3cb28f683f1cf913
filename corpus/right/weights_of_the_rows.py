"""Weights of the rows, divided by their sum

kind: right
engine: torch
author: suite
says: The data have three parts, and the loss is that of a row.
call: model, data=(X, CLASSES, W), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


def criterion(out, y, w):
    return (F.cross_entropy(out, y, reduction="none") * w).sum() / w.sum()


torch.manual_seed(1)
X, W = torch.randn(20, 3), torch.rand(20) + 0.1
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows], W[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
