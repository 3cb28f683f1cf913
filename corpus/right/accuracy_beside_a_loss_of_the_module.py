"""The module's own loss, and an accuracy with a graph

kind: right
engine: torch
author: suite
says: The pass for the accuracy has no backward pass.
call: model.actor, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))

    def loss(self, x, y):
        return F.cross_entropy(self.actor(x), y)

    def forward(self, x):
        return self.actor(x)


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Agent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = model.loss(X[rows], CLASSES[rows])
        loss.backward()
        optimizer.step()
        right = (model(X[rows]).argmax(1) == CLASSES[rows]).float().mean()
    print(epoch, right.item())
