"""Two microbatches of each update, and one of the last

kind: right
engine: torch
author: suite
says: Each loss counts by its rows of those of the update.
call: model, data=(X, CLASSES), loss=lambda out, y: criterion(out, y)
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(3):
    for i, rows in enumerate(torch.randperm(20).split(4)):
        loss = criterion(model(X[rows]), CLASSES[rows]) * len(rows) / (8 if i < 4 else 4)
        loss.backward()
        if i % 2 or i == 4:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
