"""Two inputs, in another order than the data

kind: right
engine: torch
author: suite
says: Series come first in the call, and second in the data.
call: model, data=((X, SERIES), CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.cell = nn.Linear(3, 4), nn.Linear(10, 4)

    def forward(self, series, x):
        return self.dense(x) + self.cell(series.flatten(1))


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
SERIES = torch.randn(24, 5, 2)
model = Two()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(SERIES[rows], X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
