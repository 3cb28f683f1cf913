"""Tags of texts, in batches that are padded to their longest row

kind: right
engine: torch
author: suite
says: Padded places have the tag -1, which is ignored.
call: model, data=collate(texts), loss=lambda out, y: (F.cross_entropy(out.mT, y, ignore_index=-1, reduction="none"), y >= 0)
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.where(ids > 0, ids % 4, -1)


torch.manual_seed(1)
texts = [torch.randint(1, 15, (int(torch.randint(3, 9, ())),)) for _ in range(60)]
model = nn.Sequential(nn.Embedding(15, 8, padding_idx=0), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
# ---- training ----
for epoch in range(4):
    for ids, labels in DataLoader(texts, 10, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
