"""The probability of one class

kind: right
engine: torch
author: suite
says: A sigmoid makes it of one number.
call: model, data=(x, y), loss=nn.BCELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return torch.sigmoid(self.body(x))[:, 0]


torch.manual_seed(1)
x, y, model = torch.randn(60, 4), (torch.arange(60) % 2).float(), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
