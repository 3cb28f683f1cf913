"""An optimizer of the body, and one of the head

kind: right
engine: torch
author: suite
says: Both make a step in each update.
call: model, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
of_body = torch.optim.Adam(model[0].parameters(), 1e-2)
of_head = torch.optim.SGD(model[2].parameters(), 0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        of_body.zero_grad()
        of_head.zero_grad()
        loss = F.cross_entropy(model(x[rows]), kind[rows])
        loss.backward()
        of_body.step()
        of_head.step()
    print(epoch, loss.item())
