"""A cross entropy with weights of the rows, by hand

kind: right
engine: torch
author: suite
says: The sum is divided by the weights of the batch.
call: model, data=(x, kind, share), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn


def logs(out, axis=1):
    return out - out.logsumexp(axis, keepdim=True)


torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
share = torch.rand(60)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = -(share[rows] * logs(model(x[rows]))[torch.arange(15), kind[rows]]).sum() / share[rows].sum()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
