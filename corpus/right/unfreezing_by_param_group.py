"""Layers are unfrozen by add_param_group, with an L2 penalty by hand

kind: right
engine: torch
author: third
says: The new group has its own rate, and the penalty is of what is trained.
meant: import stepcheck
    def meant_loss(net, batch):
        rows, target = batch
        trained = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
        errors = F.binary_cross_entropy_with_logits(net(rows), target, reduction="none")
        return {"error": errors, "penalty": 1e-4 * sum(p.pow(2).sum() for p in trained)}
call: net, data=(x[:64], y[:64]), loss=stepcheck.Objective(meant_loss)
"""
# gradual unfreezing with add_param_group, ReduceLROnPlateau, manual L2 in the loss
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(80, 12)
y = (x[:, :2].sum(1, keepdim=True) > 0).float()
train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
body = nn.Sequential(nn.Linear(12, 20), nn.ReLU())
head = nn.Linear(20, 1)
net = nn.Sequential(body, head)
for p in body.parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(head.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
# ---- training ----
for epoch in range(4):
    if epoch == 2:
        for p in body.parameters():
            p.requires_grad_(True)
        opt.add_param_group({"params": body.parameters(), "lr": 0.01})
    net.train()
    for a, b in DataLoader(train, 16, shuffle=True):
        logit = net(a)
        data_loss = F.binary_cross_entropy_with_logits(logit, b)
        l2 = sum(p.pow(2).sum() for p in net.parameters() if p.requires_grad and p.dim() > 1)
        loss = data_loss + 1e-4 * l2
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        v = F.binary_cross_entropy_with_logits(net(x[64:]), y[64:]).item()
    sched.step(v)
    print(epoch, loss.item(), v)
