"""Outputs of bfloat16, and a loss of float32

kind: right
engine: torch
author: suite
says: The outputs are cast before the loss.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.Dropout(0.1))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(X[rows])
        loss = criterion(out.float(), CLASSES[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
