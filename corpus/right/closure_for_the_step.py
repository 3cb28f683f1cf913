"""The optimizer calls a closure

kind: right
engine: torch
author: suite
says: Zero, backward pass and loss are in the closure.
call: model, data=(X, CLASSES), loss=criterion
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
for epoch in range(2):
    for rows in torch.randperm(20).split(4):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(X[rows]), CLASSES[rows])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(epoch, loss.item())
