"""An absolute error by hand

kind: right
engine: torch
author: suite
says: The sum is divided by the rows of the batch.
call: model, data=(x, value), loss=nn.L1Loss()
"""
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = (model(x[rows]) - value[rows]).abs().sum() / len(rows)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
