"""Squares with the weights of the rows

kind: right
engine: torch
author: suite
says: `mse_loss` divides by the sum of the weights.
call: model, data=(X, Y, W[:, 0]), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
W = torch.rand(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows]), Y[rows], weight=W[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
