"""Windows that grow, of a stream of batches

kind: right
engine: torch
author: suite
says: An update has one batch at first, and three at last.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


def stream():
    while True:
        yield from torch.randperm(60).split(4)


torch.manual_seed(1)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
model, batches = nn.Linear(4, 1), stream()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
# ---- training ----
for update in range(30):
    optimizer.zero_grad()
    num = 1 + update // 12
    for _ in range(num):
        rows = next(batches)
        loss = F.mse_loss(model(x[rows])[:, 0], y[rows])
        (loss / num).backward()
    optimizer.step()
    print(update, loss.item())
