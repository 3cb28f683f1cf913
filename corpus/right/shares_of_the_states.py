"""States that are added up by their shares

kind: right
engine: torch
author: suite
says: The shares of the places of a row add up to 1.
call: model, data=(x, y), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(3, 8, batch_first=True), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        states, _ = self.lstm(x)
        shares = (9 * states.sum(2, keepdim=True)).softmax(1)
        return self.head(self.norm((shares * states).sum(1)))


torch.manual_seed(1)
x, y, model = torch.randn(60, 5, 3), torch.arange(60) % 2, Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
