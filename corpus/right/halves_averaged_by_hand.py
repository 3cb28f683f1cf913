"""The gradients of two halves, averaged by hand

kind: right
engine: torch
author: suite
says: The gradients of each half are read before they are set to zero.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(5):
    for rows in torch.randperm(60).split(10):
        parts = []
        for half in rows.split(5):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[half]), value[half])
            loss.backward()
            parts.append([p.grad.clone() for p in model.parameters()])
        for p, one, two in zip(model.parameters(), *parts):
            p.grad = (one + two) / 2
        optimizer.step()
    print(epoch, loss.item())
