"""A critic with a penalty of its slopes

kind: right
engine: torch
author: suite
says: The penalty has a backward pass of its own.
meant: import stepcheck
    def meant_loss(critic, batch):
        between, made, real = batch
        out = critic(between)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
        penalty = 10 * (slope.norm(2, dim=1) - 1) ** 2
        return {"penalty": penalty, "distance": critic(made) - critic(real)}
call: D, loss=stepcheck.Objective(meant_loss, calls=3)
"""
import torch
from torch import nn


def penalty(one, two):
    share = torch.rand(len(one), 1)
    between = (share * one + (1 - share) * two).requires_grad_(True)
    out = D(between)
    (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
    return 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()


torch.manual_seed(1)
real = torch.randn(128, 2) * 0.5 + 1
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
of_g, of_d = (torch.optim.Adam(each.parameters(), 1e-3) for each in (G, D))
# ---- training ----
for epoch in range(3):
    for batch in real[torch.randperm(128)].split(16):
        D.zero_grad()
        fake = G(torch.randn(len(batch), 4)).detach()
        penalty(batch, fake).backward()
        (D(fake).mean() - D(batch).mean()).backward()
        of_d.step()
        G.zero_grad()
        loss = -D(G(torch.randn(len(batch), 4))).mean()
        loss.backward()
        of_g.step()
    print(epoch, loss.item())
