"""A cross entropy by hand

kind: right
engine: torch
author: suite
says: The log of the softmax is taken at the label of each row.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn


def logs(out, axis=1):
    return out - out.logsumexp(axis, keepdim=True)


torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = -logs(model(x[rows]))[torch.arange(15), kind[rows]].mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
