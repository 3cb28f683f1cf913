"""Two backward passes of one forward pass

kind: right
engine: torch
author: suite
says: Half of the loss of each output is taken at a time.
call: model, data=(X, Y), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X, Y = torch.randn(20, 3), torch.randn(20, 2)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(20).split(4):
        out = model(X[rows])
        for i in (0, 1):
            loss = F.mse_loss(out[:, i], Y[rows, i]) / 2
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
