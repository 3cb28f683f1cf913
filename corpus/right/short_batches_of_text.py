"""Batches of text as long as their longest row

kind: right
engine: torch
author: suite
says: The table has sparse gradients and an optimizer of its own.
call: model, data=(TEXT, CLASSES), loss=criterion
"""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 5, padding_idx=0, sparse=True), nn.Linear(5, 4)

    def forward(self, text):
        return self.head(self.table(text).sum(1))


torch.manual_seed(1)
TEXT = torch.randint(1, 10, (20, 6))
for i, row in enumerate(TEXT):
    row[2 + i % 4 :] = 0
CLASSES = torch.randint(0, 4, (20,))
model = Model()
criterion = nn.CrossEntropyLoss()
optimizers = torch.optim.SparseAdam(model.table.parameters()), torch.optim.Adam(model.head.parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        batch = TEXT[rows]
        loss = criterion(model(batch[:, : int((batch != 0).sum(1).max())]), CLASSES[rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
