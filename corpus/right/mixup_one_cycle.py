"""Mixup with soft labels and a rate that moves with each batch

kind: right
engine: torch
author: third
says: Rows and labels are mixed by the same factor.
call: model, data=(x, F.one_hot(y, 5).float()),
    loss=lambda logits, target: torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1)
"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def mixup(x, y, k, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    perm = torch.randperm(x.size(0))
    oh = F.one_hot(y, k).float()
    return lam * x + (1 - lam) * x[perm], lam * oh + (1 - lam) * oh[perm]


def soft_ce(logits, target):
    return torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()


np.random.seed(0)
torch.manual_seed(0)
x = torch.randn(120, 3, 4, 4)
y = torch.randint(0, 5, (120,))
x[torch.arange(120), 0, 0, 0] += y.float()
dl = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
EPOCHS = 3
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=len(dl))
# ---- training ----
for ep in range(EPOCHS):
    model.train()
    for a, b in dl:
        a, b = mixup(a, b, 5)
        loss = soft_ce(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    print(ep, loss.item(), sched.get_last_lr())
