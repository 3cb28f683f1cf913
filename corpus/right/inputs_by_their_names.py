"""Two inputs by their names, in another order

kind: right
engine: torch
author: suite
says: The model is called with keywords and returns a dict.
call: model, data=({"a": X, "b": Z}, Y), loss=criterion
"""
import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, b=None, a=None):
        return {"logits": self.head(torch.cat([a, b], 1)).squeeze(1)}


torch.manual_seed(1)
X = torch.randn(20, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(20)
Z = torch.randn(20, 2)
model = Pair()
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters())
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(b=Z[rows], a=X[rows])["logits"], Y[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
