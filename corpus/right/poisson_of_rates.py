"""A Poisson loss of rates

kind: right
engine: torch
author: suite
says: The model's outputs are made positive by `exp`.
call: model, data=(x, counts), loss=lambda out, y: (out.exp() - y * out).mean(1)
"""
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(60, 4)
counts = torch.poisson(x[:, :1].exp())
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
criterion = nn.PoissonNLLLoss(log_input=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = criterion(model(x[rows]).exp(), counts[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
