"""A part in inference mode, on purpose

kind: right
engine: torch
author: suite
says: The dropout is off, and the rest is in training mode.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# ---- training ----
for epoch in range(4):
    model.train()
    model[3].eval()
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), kind[rows])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(epoch, F.cross_entropy(model(x), kind).item())
