"""A contrastive loss by labels, in windows of two batches

kind: right
engine: torch
author: suite
says: The loss is of a batch, and the update of the mean of two.
call: model, data=(x, y), loss=lambda out, y: criterion(out, y).expand(len(y))
"""
import torch
from torch import nn
from torch.nn import functional as F


class Contrastive(nn.Module):
    def forward(self, features, labels):
        features = F.normalize(features, dim=1)
        logits, others = features @ features.T / 0.5, 1 - torch.eye(len(features))
        same = (labels[:, None] == labels[None]).float() * others
        logs = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        return -((same * logs).sum(1) / same.sum(1).clamp_min(1)).mean()


torch.manual_seed(1)
x, y = torch.randn(48, 5), torch.arange(48) % 3
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
criterion = Contrastive()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
# ---- training ----
for epoch in range(2):
    for i, rows in enumerate(torch.randperm(48).split(12)):
        loss = criterion(model(x[rows]), y[rows])
        (loss / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
