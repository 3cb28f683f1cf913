"""A model that takes a mapping

kind: right
engine: torch
author: suite
says: The inputs are an entry of a `UserDict`.
call: model, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
from collections import UserDict

import torch
from torch import nn
from torch.nn import functional as F


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, batch):
        return self.body(batch["x"])


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Named()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(UserDict(x=X[rows])), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
