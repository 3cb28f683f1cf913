"""Two models, one after the other

kind: right
engine: torch
author: suite
says: The second one is judged.
call: second, data=(x, kind), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
first, second = nn.Linear(4, 3), nn.Linear(4, 3)
# ---- training ----
for model in (first, second):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(10):
        for rows in torch.randperm(60).split(15):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), kind[rows])
            loss.backward()
            optimizer.step()
    print(loss.item())
