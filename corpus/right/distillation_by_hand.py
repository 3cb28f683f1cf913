"""A distillation by hand

kind: right
engine: torch
author: suite
says: Labels count 0.4 and the teacher 0.6 times the square of the temperature.
meant: def meant_loss(out, y):
        hard = nn.functional.cross_entropy(out, y[0], reduction="none")
        soft = nn.functional.cross_entropy(out / 2, (y[1] / 2).softmax(1), reduction="none")
        return 0.4 * hard + 2.4 * soft
call: model, data=(x, (kind, teacher)), loss=meant_loss
"""
import torch
from torch import nn


def logs(out, axis=1):
    return out - out.logsumexp(axis, keepdim=True)


torch.manual_seed(1)
x, kind = torch.randn(60, 4), torch.arange(60) * 7 % 3
teacher = torch.randn(60, 3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(60).split(15):
        optimizer.zero_grad()
        out = model(x[rows])
        hard = -logs(out)[torch.arange(15), kind[rows]].mean()
        soft = -(logs(out / 2) * (teacher[rows] / 2).softmax(1)).sum(1).mean()
        loss = 0.4 * hard + 2.4 * soft
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
