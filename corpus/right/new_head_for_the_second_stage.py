"""A new head for the second stage

kind: right
engine: torch
author: suite
says: The optimizer is made after the head.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
# ---- training ----
for stage in range(2):
    if stage:
        model[2] = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(10):
        for rows in torch.randperm(60).split(15):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), kind[rows])
            loss.backward()
            optimizer.step()
    print(stage, loss.item())
