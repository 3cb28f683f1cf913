"""Labels with the channels in front

kind: right
engine: torch
author: suite
says: The outputs are turned before the loss.
call: model, data=(SERIES, Y.transpose(1, 2)), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
SERIES = torch.randn(24, 5, 2)
Y = torch.randn(24, 3, 5)
model = nn.Linear(2, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(SERIES[rows]).transpose(1, 2), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
