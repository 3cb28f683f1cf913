"""Decay of the matrices alone

kind: right
engine: torch
author: suite
says: Biases and the norm have a group without decay.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], 1e-2)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
