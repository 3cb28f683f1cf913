"""Gradients of `autograd.grad`

kind: right
engine: torch
author: suite
says: The loop puts each gradient at its parameter.
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
        parameters = list(model.parameters())
        loss = criterion(model(X[rows]), CLASSES[rows])
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = gradient
        optimizer.step()
    print(epoch, loss.item())
