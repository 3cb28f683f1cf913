"""One cycle of the rate, by updates

kind: right
engine: torch
author: suite
says: Its steps are as many as the updates.
meant: twin = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    of_twin, rates = scheduled(twin), []
    for _ in range(16):
        rates.append(twin.param_groups[0]["lr"])
        if len(rates) < 16:
            of_twin.step()
call: model, data=(x, value), loss=nn.MSELoss(), learning_rate=lambda n: rates[min(n, 15)]
"""
import torch
from torch import nn
from torch.nn import functional as F


def scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=16, cycle_momentum=False)


torch.manual_seed(1)
x = torch.randn(60, 4)
value = x[:, :1] * 2 + 0.3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scheduler = scheduled(optimizer)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), value[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(epoch, loss.item())
