"""A cosine over the passes

kind: right
engine: torch
author: suite
says: The scheduler makes a step after each pass.
meant: import math
call: model, data=(x, value), loss=nn.MSELoss(),
    learning_rate=lambda n: 0.05 * (1 + math.cos(math.pi * (n // 4) / 6))
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(epoch, loss.item())
