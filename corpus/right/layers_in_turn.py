"""Two stages, each of one layer

kind: right
engine: torch
author: suite
says: Each stage has an optimizer of its layer, and the other one is frozen.
call: model, data=(x, y), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
x, y = torch.randn(48, 5), torch.arange(48) % 3
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
criterion = nn.CrossEntropyLoss()
# ---- training ----
for i in (0, 2):
    for j in (0, 2):
        model[j].requires_grad_(i == j)
    optimizer = torch.optim.SGD(model[i].parameters(), 0.05)
    for epoch in range(2):
        for rows in torch.randperm(48).split(12):
            optimizer.zero_grad()
            loss = criterion(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        print(i, epoch, loss.item())
