"""A model that shifts its labels, as those of Transformers do

kind: right
engine: torch
author: suite
says: The last place has no label.
meant: def meant_loss(out, y):
        return F.cross_entropy(out[0][:, :-1].mT, y[:, 1:], reduction="none").mean(1)
call: model, data=(ids, ids), loss=meant_loss
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, x, labels):
        out = self.head(self.table(x))
        next_ones = F.pad(labels[:, 1:], (0, 1), value=-100)
        return out, F.cross_entropy(out.reshape(-1, 9), next_ones.reshape(-1))


torch.manual_seed(1)
ids = torch.randint(1, 9, (48, 6))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(48).split(8):
        optimizer.zero_grad()
        loss = model(ids[rows], labels=ids[rows])[1]
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
