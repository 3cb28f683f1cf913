"""A contrastive loss of pairs

kind: right
engine: torch
author: suite
says: The label 1 says that the two of a pair are alike.
call: model, data=(x, same), loss=criterion
"""
import torch
from torch import nn


def criterion(out, same):
    return same * out**2 + (1 - same) * (2 - out).clamp(min=0) ** 2


torch.manual_seed(1)
x, same = torch.randn(80, 6), torch.randint(0, 2, (80,)).float()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Softplus(), nn.Flatten(0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(80).split(16):
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), same[rows]).mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
