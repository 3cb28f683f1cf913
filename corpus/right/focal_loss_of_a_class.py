"""A focal loss, as a module

kind: right
engine: torch
author: suite
says: The criterion is a module of the loop's author.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.nn import functional as F


class Focal(nn.Module):
    def forward(self, out, y):
        cross = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-cross)) ** 2 * cross).mean()


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
criterion = Focal()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
