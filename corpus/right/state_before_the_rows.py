"""A first state before the rows

kind: right
engine: torch
author: suite
says: The state is zeros in each batch.
call: model, data=(SERIES, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Stepwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, state, x):
        return self.head(self.cell(x, state)[0][:, -1])


torch.manual_seed(1)
SERIES = torch.randn(24, 5, 2)
CLASSES = torch.randint(0, 4, (24,))
model = Stepwise()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.zeros(1, len(rows), 4), SERIES[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
