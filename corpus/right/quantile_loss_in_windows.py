"""A quantile loss, in windows of two batches

kind: right
engine: torch
author: suite
says: Each half of a window counts half.
call: model, data=(X, Y), loss=criterion
"""
import torch
from torch import nn


class Quantile(nn.Module):
    def forward(self, out, y):
        off = y - out
        return torch.maximum(0.9 * off, -0.1 * off).mean()


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
criterion = Quantile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        for part in rows.split(4):
            loss = criterion(model(X[part]), Y[part])
            (loss / 2).backward()
        optimizer.step()
    print(epoch, loss.item())
