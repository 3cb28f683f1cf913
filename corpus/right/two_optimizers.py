"""Two optimizers of one model

kind: right
engine: torch
author: suite
says: Each makes a step of its part, and then sets its gradients to zero.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizers = torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
