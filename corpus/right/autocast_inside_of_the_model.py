"""A model that casts inside

kind: right
engine: torch
author: suite
says: Its forward pass is under autocast.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn


class Cast(nn.Sequential):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = Cast(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]).float(), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
