"""Squares, and a penalty of the outputs

kind: right
engine: torch
author: suite
says: The penalty is part of the intention.
call: model, data=(x, value), loss=lambda out, y: ((out - y) ** 2 + 0.1 * out**2).mean(1)
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        out = model(x[rows])
        loss = F.mse_loss(out, value[rows]) + 0.1 * out.square().mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
