"""A rate that falls on a plateau

kind: right
engine: torch
author: suite
says: The scheduler gets the loss of each pass.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    scheduler.step(loss.item())
    print(epoch, loss.item())
