"""Sharpness-aware minimisation by hand

kind: right
engine: torch
author: suite
says: The second gradient is taken near the weights, and moves them.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        before = [p.detach().clone() for p in model.parameters()]
        criterion(model(X[rows]), CLASSES[rows]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.05 * p.grad
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before):
                p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
