"""The last state of a series

kind: right
engine: torch
author: suite
says: The places are brought to the front for an LSTM that wants them there.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class InTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cell(x.transpose(0, 1))[0][-1])


torch.manual_seed(1)
x = torch.randn(96, 24, 1)
y, model = x[:, -1], InTime()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(96).split(32):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
