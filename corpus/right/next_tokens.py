"""A model of the next token

kind: right
engine: torch
author: suite
says: Inputs end before the last place, and labels begin after the first.
call: model, data=(ids[:, :-1], ids[:, 1:]), loss=lambda out, y: F.cross_entropy(out.mT, y, reduction="none")
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9))

    def forward(self, x):
        return self[2](self[1](self[0](x))[0])


torch.manual_seed(1)
ids = torch.randint(1, 9, (60, 6))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[rows][:, :-1]).reshape(-1, 9), ids[rows][:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
