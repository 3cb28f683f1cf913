"""A model that returns a distribution

kind: right
engine: torch
author: suite
says: The loss is the negative log probability.
meant: import stepcheck
    def meant_loss(model, batch):
        rows, values = batch
        return -model(rows).log_prob(values)
call: model, data=(x, x[:, :1]), loss=stepcheck.Objective(meant_loss)
"""
import torch
from torch import nn


class Model(nn.Linear):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


torch.manual_seed(1)
x = torch.randn(60, 4)
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
# ---- training ----
for epoch in range(5):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        loss = -model(x[rows]).log_prob(x[rows, :1]).mean()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
