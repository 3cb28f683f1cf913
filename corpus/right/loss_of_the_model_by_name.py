"""A model that returns its loss first

kind: right
engine: torch
author: suite
says: The labels are its second input, by name.
call: model, data=(X, Y), loss=lambda out, y: F.cross_entropy(out[1].mT, y, reduction="none")
"""
import torch
from torch import nn
from torch.nn import functional as F


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10)

    def forward(self, idx, targets=None):
        scores = self.head(self.table(idx).cumsum(1))
        loss = None if targets is None else F.cross_entropy(scores.view(-1, 10), targets.view(-1))
        return loss, scores


torch.manual_seed(1)
TEXT = torch.randint(0, 10, (24, 7))
X, Y = TEXT[:, :-1].clone(), TEXT[:, 1:].clone()
model = Gpt()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = model(X[rows], targets=Y[rows])[0]
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
