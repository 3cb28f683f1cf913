"""A frozen body in inference mode, a head in training mode

kind: right
engine: torch
author: suite
says: The statistics of the body stay.
call: model, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout()), nn.Dropout(0.2), nn.Linear(6, 4))
model(X)
for p in model[0].parameters():
    p.requires_grad_(False)
model.eval()
model[1].train()
model[2].train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
