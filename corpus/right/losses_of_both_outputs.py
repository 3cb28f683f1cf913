"""A loss of each output

kind: right
engine: torch
author: suite
says: The loss of the features counts a tenth.
meant: def meant_loss(out, y):
        features, scores = out
        of_features = F.cross_entropy(features, y, reduction="none")
        return F.cross_entropy(scores, y, reduction="none") + 0.1 * of_features
call: model, data=(X, CLASSES), loss=meant_loss
"""
import torch
from torch import nn
from torch.nn import functional as F


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        scores = self.head(features)
        return features, scores


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Several()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        features, scores = model(X[rows])
        loss = F.cross_entropy(scores, CLASSES[rows]) + 0.1 * F.cross_entropy(features, CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
