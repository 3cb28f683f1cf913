"""A module that is called without inputs

kind: right
engine: torch
author: suite
says: It returns a value for each row.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(24, 1))

    def forward(self):
        return self.at * 1.0


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = Point()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model()[rows], Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
