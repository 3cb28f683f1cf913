"""A module before the model

kind: right
engine: torch
author: suite
says: The optimizer holds both.
call: whole, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
first, model = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
whole = nn.Sequential(first, model)
optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(whole(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
