"""A group of parameters whose rate is 0 at first

kind: right
engine: torch
author: suite
says: The first layer begins after two passes.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=1e-2)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2 * (epoch > 0)
    print(epoch, loss.item())
