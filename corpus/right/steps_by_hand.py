"""Steps by hand, without an optimizer

kind: right
engine: torch
author: suite
says: Each parameter moves by its rate times its gradient.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        model.zero_grad()
        loss = criterion(model(X[rows]), CLASSES[rows])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    print(epoch, loss.item())
