"""Weights of classes that are parameters

kind: right
engine: torch
author: suite
says: They are learned beside the model.
call: model, data=(X, SHARES), loss=lambda out, y: F.cross_entropy(out, y, weight=log_weights.exp())
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X, SHARES = torch.randn(24, 3), torch.rand(24, 4).softmax(1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
log_weights = nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([*model.parameters(), log_weights], lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), SHARES[rows], weight=log_weights.exp())
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
