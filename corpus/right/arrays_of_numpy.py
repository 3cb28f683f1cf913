"""Rows that are taken out of an array

kind: right
engine: torch
author: suite
says: Each batch is made a tensor.
call: model, data=(x, labels), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
inputs, labels = x.numpy(), (y > 0).long()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(8):
        loss = F.cross_entropy(model(torch.tensor(inputs[rows])), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
