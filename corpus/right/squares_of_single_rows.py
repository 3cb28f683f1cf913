"""A mean of the losses of single rows

kind: right
engine: torch
author: suite
says: The losses of the rows are stacked.
call: model, data=(x, value), loss=nn.MSELoss()
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
        loss = torch.stack([F.mse_loss(a, b) for a, b in zip(model(x[rows]), value[rows])]).mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
