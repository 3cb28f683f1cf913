"""LBFGS, whose step takes several gradients

kind: right
engine: torch
author: suite
says: Each step calls the closure up to four times.
call: model, data=(X, Y), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(20)
model = nn.Linear(3, 1)
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(X[rows]).squeeze(1), Y[rows])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(epoch, loss.item())
