"""A sum of squares, divided by the rows of its batch

kind: right
engine: torch
author: suite
says: The last batch has six rows.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(66, 4)
value = x[:, 0] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(66).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]).squeeze(-1), value[rows], reduction="sum") / len(rows)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
