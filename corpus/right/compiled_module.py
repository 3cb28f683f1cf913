"""A compiled module

kind: right
engine: torch
author: suite
says: The loop calls what `torch.compile` returns.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(3, 6), nn.Dropout(0.1), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.drop(self.first(x).relu()))


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = torch.compile(Model(), backend="aot_eager", fullgraph=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
