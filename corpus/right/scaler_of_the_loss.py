"""A loss scale

kind: right
engine: torch
author: suite
says: The scaler makes the step, and moves its scale.
call: model, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.Dropout(0.1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), CLASSES[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(epoch, loss.item())
