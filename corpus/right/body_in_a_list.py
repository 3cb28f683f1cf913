"""Layers in a list

kind: right
engine: torch
author: suite
says: A module list makes them parts of the model.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.more, self.head = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        for layer in self.more:
            h = layer(h)
        return self.head(h)


torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), kind[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
