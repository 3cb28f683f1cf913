"""The last layer alone is trained

kind: right
engine: torch
author: suite
says: The frozen part is in inference mode, and the optimizer holds the rest.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
model[:2].requires_grad_(False)
model[1].eval()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model[3].parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
