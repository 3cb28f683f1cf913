"""A hundredfold loss under autocast, on purpose

kind: right
engine: torch
author: suite
says: The factor is part of the intention.
call: model, data=(X, Y), loss=lambda out, y: 100 * (out - y).square().mean(1)
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = 100 * F.mse_loss(model(X[rows]).float(), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
