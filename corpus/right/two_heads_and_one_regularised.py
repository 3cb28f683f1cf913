"""Two heads, one of which is to be small

kind: right
engine: torch
author: suite
says: The scores have a cross entropy, the other output its square.
call: model, data=(X, CLASSES),
    loss=lambda out, y: F.cross_entropy(out[1], y, reduction="none") + out[0].square().sum(1)
"""
import torch
from torch import nn
from torch.nn import functional as F


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.one(h), self.two(h)


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Heads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        small, scores = model(X[rows])
        loss = F.cross_entropy(scores, CLASSES[rows]) + small.square().mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
