"""A warm-up times a decay

kind: right
engine: torch
author: suite
says: Two schedules are multiplied.
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
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    return torch.optim.lr_scheduler.ChainedScheduler([warm, decay])


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
