"""Half of the loss, on purpose

kind: right
engine: torch
author: suite
says: The factor is part of the intention.
call: model, data=(X, CLASSES), loss=lambda out, y: 0.5 * F.cross_entropy(out, y, reduction="none")
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
        optimizer.zero_grad()
        loss = 0.5 * F.cross_entropy(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
