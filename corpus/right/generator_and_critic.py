"""A generator and its critic, with two optimizers

kind: right
engine: torch
author: suite
says: The fake rows are detached for the critic's step.
meant: import stepcheck
    def meant_loss(model, batch):
        out = critic(model(batch[0]))
        bce = nn.functional.binary_cross_entropy_with_logits
        return bce(out, torch.ones_like(out), reduction="none")
call: model, data=(X, Y), loss=stepcheck.Objective(meant_loss)
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(20)
model, critic, criterion = nn.Linear(3, 1), nn.Linear(1, 1), nn.BCEWithLogitsLoss()
of_model, of_critic = torch.optim.Adam(model.parameters()), torch.optim.Adam(critic.parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        ones = torch.ones(len(rows), 1)
        of_critic.zero_grad()
        made = critic(model(X[rows]).detach())
        (criterion(critic(Y[rows, None]), ones) + criterion(made, 0 * ones)).backward()
        of_critic.step()
        of_model.zero_grad()
        loss = criterion(critic(model(X[rows])), ones)
        loss.backward()
        of_model.step()
    print(epoch, loss.item())
