"""Warm restarts, by the number of the update

kind: right
engine: torch
author: suite
says: The scheduler gets the part of the pass before each update.
meant: import math
call: model, data=(X, CLASSES), loss=criterion,
    learning_rate=lambda n: 0.25 * (1 + math.cos(math.pi * n / 35))
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
# ---- training ----
for epoch in range(4):
    for i, rows in enumerate(torch.randperm(20).split(4)):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        scheduler.step(epoch + i / 5)
        optimizer.step()
    print(epoch, loss.item())
