"""A loss scale by hand, and a clip

kind: right
engine: torch
author: suite
says: The gradients are divided before they are clipped.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        (loss * 512.0).backward()
        for p in model.parameters():
            p.grad /= 512.0
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    print(epoch, loss.item())
