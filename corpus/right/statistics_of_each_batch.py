"""A norm without running statistics

kind: right
engine: torch
author: suite
says: Each batch is normalised by itself, in inference too.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(96, 24, 1)
y = x[:, -1]
model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24, track_running_stats=False), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(96).split(32):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
