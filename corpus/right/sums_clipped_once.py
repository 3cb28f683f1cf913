"""Sums of microbatches, clipped once

kind: right
engine: torch
author: suite
says: The gradients of a batch are added up, divided by its rows and clipped.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn

torch.manual_seed(1)
x, y = torch.randn(44, 4), torch.randn(44, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
# ---- training ----
for epoch in range(4):
    for batch in torch.randperm(44).split(20):
        held = [torch.zeros_like(p) for p in model.parameters()]
        for rows in batch.split(5):
            loss = ((model(x[rows]) - y[rows]) ** 2).sum()
            gradients = torch.autograd.grad(loss, [*model.parameters()])
            held = [a + g for a, g in zip(held, gradients)]
        held = [a / len(batch) for a in held]
        share = min(1.0, 0.2 / float(sum((g**2).sum() for g in held)) ** 0.5)
        for p, total in zip(model.parameters(), held):
            p.grad = share * total
        optimizer.step()
    print(epoch, loss.item())
