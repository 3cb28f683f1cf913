"""A rate that is halved after each pass

kind: right
engine: torch
author: suite
says: The scheduler makes a step after each pass.
call: model, data=(X, CLASSES), loss=criterion,
    learning_rate=lambda n: 0.1 * 0.5 ** (n // 5)
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
# ---- training ----
for epoch in range(4):
    for rows in torch.randperm(20).split(4):
        optimizer.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(epoch, loss.item())
