"""A divergence of shares

kind: right
engine: torch
author: suite
says: `kl_div` gets log probabilities.
call: model, data=(x, shares), loss=lambda out, y: F.kl_div(F.log_softmax(out, 1), y, reduction="none").sum(1)
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, shares = torch.randn(60, 4), torch.randn(60, 3).softmax(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.kl_div(F.log_softmax(model(x[rows]), 1), shares[rows], reduction="batchmean")
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
