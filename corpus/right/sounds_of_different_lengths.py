"""Sounds that are cut to the length of their batch

kind: right
engine: torch
author: suite
says: The length changes from batch to batch.
call: model, loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
SERIES = torch.randn(24, 5, 2)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        length = 5 + int(rows[0]) % 3
        loss = F.cross_entropy(model(SERIES[rows].mT.repeat(1, 1, 2)[..., :length]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
