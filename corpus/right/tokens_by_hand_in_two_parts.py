"""Padded texts in two parts, and a mean over the tokens of both

kind: right
engine: torch
author: suite
says: Each part is cut to its longest row.
meant: def meant_loss(out, y):
        y = y[:, : out.shape[1]]
        return nn.functional.cross_entropy(out.mT, y, reduction="none"), y != 0
call: model, data=(ids[:, :-1], ids[:, 1:]), loss=meant_loss
"""
import torch
from torch import nn

torch.manual_seed(1)
ids = torch.randint(1, 9, (96, 12))
ids[torch.arange(12) >= torch.randint(3, 13, (96, 1))] = 0
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(96).split(16):
        parts = [ids[part] for part in rows.split(8)]
        parts = [part[:, : int((part != 0).sum(1).max())] for part in parts]
        count = sum((part[:, 1:] != 0).sum() for part in parts)
        optimizer.zero_grad()
        for part in parts:
            inputs, y = part[:, :-1], part[:, 1:]
            nll = -model(inputs).log_softmax(-1).gather(-1, y[..., None])[..., 0]
            loss = (nll * (y != 0)).sum() / count
            loss.backward()
        optimizer.step()
    print(epoch, loss.item())
