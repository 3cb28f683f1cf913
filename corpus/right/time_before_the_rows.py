"""A number of time before the rows

kind: right
engine: torch
author: suite
says: The model is called with the same time in each batch.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class InTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 1)

    def forward(self, t, x):
        return self.dense(torch.cat([x, t.expand(len(x), 1)], 1))


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model, time = InTime(), torch.tensor(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(time, X[rows]), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
