"""Weights of classes, by hand

kind: right
engine: torch
author: suite
says: The sum is divided by the weights of the batch.
call: model, data=(x, y, torch.tensor([0.4, 1.5, 2.5])[y]), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, y = torch.randn(120, 6), torch.randint(0, 3, (120,))
by_class = torch.tensor([0.4, 1.5, 2.5])
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(120).split(20):
        optimizer.zero_grad()
        out, labels = model(x[rows]), y[rows]
        weights = by_class[labels]
        loss = (F.cross_entropy(out, labels, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
