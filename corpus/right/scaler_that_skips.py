"""A loss scale that is too large at first

kind: right
engine: torch
author: suite
says: The first steps are skipped, for their gradients are not finite.
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
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(X[rows]), CLASSES[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(epoch, loss.item())
