"""Attention that leaves out padded places

kind: right
engine: torch
author: suite
says: The mask is True where a place is padded.
call: model, data=((x, padded), y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, mask):
        return self.head(self.body(x, x, x, key_padding_mask=mask)[0].sum(1))


torch.manual_seed(1)
padded = torch.arange(6) >= torch.randint(1, 6, (60, 1))
x, y = torch.randn(60, 6, 4) * ~padded[..., None], torch.randn(60, 1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
# ---- training ----
for epoch in range(3):
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows], padded[rows]), y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
