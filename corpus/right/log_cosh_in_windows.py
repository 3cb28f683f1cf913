"""A log cosh by hand, in windows of four batches

kind: right
engine: torch
author: suite
says: The last two batches of a pass are a window too.
call: model, data=(x, y), loss=lambda out, y: torch.log(torch.cosh(out.squeeze(-1) - y))
"""
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(70, 4)
y = x[:, 0] * 2
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
# ---- training ----
for epoch in range(5):
    optimizer.zero_grad()
    for i, rows in enumerate(torch.randperm(70).split(7)):
        error = model(x[rows]).squeeze(-1) - y[rows]
        loss = torch.log(torch.cosh(error)).mean()
        (loss / (4 if i < 8 else 2)).backward()
        if (i + 1) % 4 == 0 or i == 9:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
