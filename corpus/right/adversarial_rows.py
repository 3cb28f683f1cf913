"""Rows that are moved against the model

kind: right
engine: torch
author: suite
says: The first gradient is of the rows, and is set to zero in the model.
call: model, loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        x = X[rows].requires_grad_()
        F.cross_entropy(model(x), CLASSES[rows]).backward()
        near = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(near), CLASSES[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
