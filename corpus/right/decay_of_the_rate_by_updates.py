"""A rate that falls slowly over many updates

kind: right
engine: torch
author: suite
says: The scheduler makes a step after each of 240 updates.
call: model, data=(X, Y), loss=nn.MSELoss(), learning_rate=lambda n: 0.1 * 0.98**n
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
# ---- training ----
for epoch in range(80):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows]), Y[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
    if epoch % 20 == 19:
        print(epoch, loss.item())
