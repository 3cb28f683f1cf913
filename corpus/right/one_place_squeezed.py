"""A model of one place

kind: right
engine: torch
author: suite
says: The place is squeezed before the loss.
call: model, data=(X, CLASSES), loss=lambda out, y: F.cross_entropy(out[:, 0], y, reduction="none")
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Linear(3, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]).squeeze(1), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
