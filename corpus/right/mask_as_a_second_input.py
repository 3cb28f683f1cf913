"""A mask as a second input

kind: right
engine: torch
author: suite
says: Masked numbers of a row are 0.
call: model, data=((X, MASK), Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x, mask):
        return self.inner(x * mask)


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
MASK = torch.arange(3).repeat(24, 1) < 2
model = Masked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows], MASK[rows]), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
