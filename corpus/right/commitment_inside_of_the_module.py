"""A loss inside of the module, beside one outside

kind: right
engine: torch
author: suite
says: The module returns its commitment loss beside the scores.
call: model, data=(X, CLASSES), loss=lambda out, y: F.cross_entropy(out[0], y) + 0.25 * out[1]
"""
import torch
from torch import nn
from torch.nn import functional as F


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        code = self.body(x)
        return self.head(code), F.mse_loss(code, code.detach().round())


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Coded()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        scores, commitment = model(X[rows])
        loss = F.cross_entropy(scores, CLASSES[rows]) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
