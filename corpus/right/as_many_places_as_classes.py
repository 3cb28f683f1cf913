"""As many places as classes, made flat

kind: right
engine: torch
author: suite
says: Rows and places are one axis in the loss.
call: model, data=(SERIES, Y), loss=lambda out, y: F.cross_entropy(out.mT, y, reduction="none")
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
SERIES = torch.randn(24, 5, 2)
Y = torch.randint(0, 5, (24, 5))
model = nn.Linear(2, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(SERIES[rows]).reshape(-1, 5), Y[rows].reshape(-1))
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
