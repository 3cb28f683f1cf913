"""Gradients of three microbatches, held by hand

kind: right
engine: torch
author: suite
says: The third one is added before the step.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, y = torch.randn(72, 4), torch.randn(72, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
held = [torch.zeros_like(p) for p in model.parameters()]
# ---- training ----
for epoch in range(2):
    for i, rows in enumerate(torch.randperm(72).split(6), start=1):
        loss = F.mse_loss(model(x[rows]), y[rows])
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        held = [a + b for a, b in zip(held, gradients)]
        if i % 3 == 0:
            for p, total in zip(model.parameters(), held):
                p.grad = total / 3
            optimizer.step()
            held = [torch.zeros_like(p) for p in model.parameters()]
    print(epoch, loss.item())
