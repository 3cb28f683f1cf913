"""A layer that reverses the gradient, on purpose

kind: right
engine: torch
author: suite
says: The first layer is meant to make the loss larger.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(Own.apply(self.first(x)))


torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
