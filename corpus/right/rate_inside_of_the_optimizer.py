"""An optimizer that has no rate

kind: right
engine: torch
author: suite
says: It takes its rate from the number of its steps.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Rateless(torch.optim.Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, options)
        self.num = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num += 1
        for p in self.param_groups[0]["params"]:
            p -= 0.1 / self.num**0.5 * p.grad


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = Rateless(model.parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows]), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
