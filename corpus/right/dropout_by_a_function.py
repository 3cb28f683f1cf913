"""A dropout by a function

kind: right
engine: torch
author: suite
says: It gets the mode of the module.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.3, training=self.training))


torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = Net(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# ---- training ----
for epoch in range(4):
    model.train()
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), kind[rows])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(epoch, F.cross_entropy(model(x), kind).item())
