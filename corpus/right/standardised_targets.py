"""Targets with a mean of 0 and a deviation of 1

kind: right
engine: torch
author: suite
says: They are standardised before the loop.
call: model, data=(x, target), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
y = x.sum(1) * 5 + 14
target = (y - y.mean()) / y.std()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows])[:, 0], target[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
