"""An energy, and its derivative inside of the module

kind: right
engine: torch
author: suite
says: Both are returned, and have a loss.
meant: def meant_loss(out, y):
        return (out[0] - y[0]).square().mean(1) + (out[1] - y[1]).square().mean(1)
call: model, data=(X, (Y, FORCES)), loss=meant_loss
"""
import torch
from torch import nn
from torch.nn import functional as F


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        energy = self.net(x)
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
FORCES = torch.randn(24, 3)
model = Energy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        energy, force = model(X[rows].requires_grad_())
        loss = F.mse_loss(energy, Y[rows]) + F.mse_loss(force, FORCES[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
