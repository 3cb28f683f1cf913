"""A loss in inference mode after each update

kind: right
engine: torch
author: suite
says: The passes for the metric have a graph that is never used.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
        model.eval()
        shown = criterion(model(X[rows]), CLASSES[rows]).item()
        model.train()
    print(epoch, shown)
