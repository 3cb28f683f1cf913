"""Windows of three batches of text, clipped

kind: right
engine: torch
author: suite
says: Each sum is divided by the tokens of its window, and the last window has two batches.
call: model, data=(ids[:, :-1], ids[:, 1:]), loss=nn.CrossEntropyLoss(ignore_index=0), rows="once"
"""
import torch
from torch import nn

torch.manual_seed(1)
ids, ends = torch.randint(1, 300, (32, 8)), torch.randint(3, 9, (32, 1))
ids[torch.arange(8) >= ends] = 0
model = nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 300))
criterion = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(3):
    batches = torch.randperm(32).split(4)
    for i, rows in enumerate(batches):
        window = torch.cat(batches[i - i % 3 : i - i % 3 + 3])
        count = (ids[window, 1:] != 0).sum()
        loss = criterion(model(ids[rows, :-1]).reshape(-1, 300), ids[rows, 1:].reshape(-1))
        (loss / count).backward()
        if (i + 1) % 3 == 0 or i + 1 == len(batches):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
