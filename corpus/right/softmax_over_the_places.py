"""A softmax over the places

kind: right
engine: torch
author: suite
says: The shares of the places of each channel add up to 1.
call: model, data=(SERIES, SHARES), loss=lambda out, y: -(y * out.log_softmax(1)).sum(1).mean(1)
"""
import torch
from torch import nn

torch.manual_seed(1)
SERIES = torch.randn(24, 5, 2)
SHARES = torch.randn(24, 5, 4).softmax(1)
model = nn.Linear(2, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = -(SHARES[rows] * model(SERIES[rows]).log_softmax(1)).sum(1).mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
