"""A group without decay, for names that are not there

kind: right
engine: torch
author: suite
says: No layer is called so, and all weights decay.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 1, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


torch.manual_seed(1)
X = torch.randn(24, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(24, 1)
model = Scaled()
names = "bias", "LayerNorm.weight"
decayed = [p for name, p in model.named_parameters() if not any(each in name for each in names)]
others = [p for name, p in model.named_parameters() if any(each in name for each in names)]
groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[rows]), Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
