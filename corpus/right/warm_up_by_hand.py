"""A rate that grows with the updates, by hand

kind: right
engine: torch
author: suite
says: The loop sets the rate before each step.
call: model, data=(x, value), loss=nn.MSELoss(), learning_rate=lambda n: (n + 1) / 16 * 1e-2
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
num = 0
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        num += 1
        optimizer.param_groups[0]["lr"] = num / 16 * 1e-2
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
