"""Two heads, and an input without rows

kind: right
engine: torch
author: suite
says: The scale is one row for each batch.
call: model, data=(X, (CLASSES, Y)), loss=criterion
"""
import torch
from torch import nn
from torch.nn import functional as F


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x, scale):
        return self.one(x * scale), self.two(x)


def criterion(out, y):
    return F.cross_entropy(out[0], y[0]) + F.mse_loss(out[1].squeeze(1), y[1])


torch.manual_seed(1)
X = torch.randn(20, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(20)
CLASSES = torch.randint(0, 4, (20,))
model, scale = Heads(), torch.ones(1, 3)
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows], scale), (CLASSES[rows], Y[rows]))
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
