"""Weights of the rows, divided by the number of rows

kind: right
engine: torch
author: suite
says: A mean over the rows is as right as one over their weights.
call: model, data=(X, CLASSES, W),
    loss=lambda out, y, w: w * criterion(out, y)
"""
import torch
from torch import nn

torch.manual_seed(1)
X, W = torch.randn(20, 3), torch.rand(20) + 0.1
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss(reduction="none")
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = (criterion(model(X[rows]), CLASSES[rows]) * W[rows]).mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
