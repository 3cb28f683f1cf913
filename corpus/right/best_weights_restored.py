"""The best weights are restored

kind: right
engine: torch
author: suite
says: They are copied when they are the best.
call: model, data=(x, value), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
best, least = None, float("inf")
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        total = F.mse_loss(model(x), value).item()
    if total < least:
        best, least = {k: v.clone() for k, v in model.state_dict().items()}, total
    print(epoch, total)
model.load_state_dict(best)
