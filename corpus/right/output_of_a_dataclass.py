"""A model that returns a dataclass

kind: right
engine: torch
author: suite
says: The loss is of one field.
call: model, data=(X, CLASSES),
    loss=lambda out, y: F.cross_entropy(out.scores, y, reduction="none")
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Out:
    features: torch.Tensor
    scores: torch.Tensor


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        scores = self.head(features)
        return Out(features, scores)


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Several()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]).scores, CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
