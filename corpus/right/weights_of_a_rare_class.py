"""Weights by the frequency of the classes

kind: right
engine: torch
author: suite
says: The rarer a class, the more it counts.
call: model, data=(x, y, (120 / torch.bincount(y))[y]), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn

torch.manual_seed(1)
x, y = torch.randn(120, 4), (torch.arange(120) % 12 == 0).long()
weights = 120 / torch.bincount(y)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(120).split(40):
        nll = -model(x[rows]).log_softmax(1).gather(1, y[rows][:, None])[:, 0]
        loss = (weights[y[rows]] * nll).sum() / weights[y[rows]].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
