"""A closure with a second pass

kind: right
engine: torch
author: suite
says: The second pass is for a metric, and has no gradient.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(X[rows]), CLASSES[rows])
            loss.backward()
            with torch.no_grad():
                model(X)
            return loss

        loss = optimizer.step(closure)
    print(epoch, loss.item())
