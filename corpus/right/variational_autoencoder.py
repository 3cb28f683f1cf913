"""A variational autoencoder, with a penalty of its outputs

kind: right
engine: torch
author: suite
says: A sum of squares, the divergence and a penalty are one loss.
meant: def meant_loss(out, x):
        made, mean, log, penalty = out
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return (made - x).square().sum() + divergence + 0.1 * penalty
call: model, data=(X, X), loss=meant_loss
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mean, self.log, self.last = (nn.Linear(*sizes) for sizes in ((3, 6), (6, 2), (6, 2), (2, 3)))

    def forward(self, x):
        h = self.first(x).relu()
        mean, log = self.mean(h), self.log(h)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp() if self.training else mean
        made = self.last(z)
        return made, mean, log, made.square().mean()


torch.manual_seed(1)
X = torch.randn(20, 3)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        made, mean, log, penalty = model(X[rows])
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        loss = F.mse_loss(made, X[rows], reduction="sum") + divergence + 0.1 * penalty
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
