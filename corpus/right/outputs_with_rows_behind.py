"""Outputs whose rows are the second axis

kind: right
engine: torch
author: suite
says: The loss brings them into the form of the labels.
meant: import stepcheck
    def meant_loss(model, batch):
        rows, wanted = batch
        return (model(rows).T - wanted).square()
call: model, data=(x, value), loss=stepcheck.Objective(meant_loss)
"""
import torch
from torch import nn


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x).T


torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = Turned(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = (model(x[rows]).reshape(-1, 1) - value[rows]).square().mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
