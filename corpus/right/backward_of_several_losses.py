"""One backward pass of two losses

kind: right
engine: torch
author: suite
says: `autograd.backward` gets both halves of a batch.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        losses = [F.mse_loss(model(X[part]), Y[part]) for part in rows.split(4)]
        optimizer.zero_grad()
        torch.autograd.backward(loss / 2 for loss in losses)
        optimizer.step()
    print(epoch, losses[-1].item())
