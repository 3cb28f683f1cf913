"""Sums whose gradients are divided by the rows of a window

kind: right
engine: torch
author: suite
says: The loop counts the rows of both batches.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
model, criterion = nn.Linear(4, 1), nn.MSELoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
# ---- training ----
for epoch in range(6):
    num = 0
    for i, rows in enumerate(torch.randperm(60).split(8)):
        loss = criterion(model(x[rows])[:, 0], y[rows])
        loss.backward()
        num += len(rows)
        if i % 2:
            for p in model.parameters():
                p.grad.div_(num)
            optimizer.step()
            optimizer.zero_grad()
            num = 0
    print(epoch, loss.item())
