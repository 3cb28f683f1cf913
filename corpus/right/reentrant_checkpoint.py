"""A reentrant checkpoint

kind: right
engine: torch
author: suite
says: The block runs again inside of the backward pass.
call: model, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 4))

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=True)


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Saving()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
