"""A warm-up, and then a cosine

kind: right
engine: torch
author: suite
says: Two schedules follow each other after four updates.
meant: twin = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    of_twin, rates = scheduled(twin), []
    for _ in range(60):
        rates.append(twin.param_groups[0]["lr"])
        of_twin.step()
call: model, data=(X, CLASSES), loss=criterion,
    learning_rate=lambda n: rates[n]
"""
import torch
from torch import nn


def scheduled(optimizer):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = scheduled(optimizer)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(epoch, loss.item())
