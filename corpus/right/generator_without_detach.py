"""A generator whose fake rows are not detached

kind: right
engine: torch
author: suite
says: The critic's loss leaves a gradient in the generator, which is set to zero before its own.
meant: import stepcheck
    def generators(generator, batch):
        out = critic(generator(*batch))
        bce = nn.functional.binary_cross_entropy_with_logits
        return bce(out, torch.ones_like(out), reduction="none")
call: generator, loss=stepcheck.Objective(generators)
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
generator, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
of_generator, of_critic = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (generator, critic))
criterion = nn.BCEWithLogitsLoss()
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        ones = torch.ones(len(rows), 1)
        of_critic.zero_grad()
        made = generator(torch.randn(len(rows), 2))
        criterion(critic(X[rows]), ones).backward()
        criterion(critic(made), 0 * ones).backward(retain_graph=True)
        of_critic.step()
        of_generator.zero_grad()
        loss = criterion(critic(made), ones)
        loss.backward()
        of_generator.step()
    print(epoch, loss.item())
