"""A loss with a backward pass by hand

kind: right
engine: torch
author: suite
says: Its derivative is that of its forward pass.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()


torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = Square.apply(model(x[rows]) - value[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
