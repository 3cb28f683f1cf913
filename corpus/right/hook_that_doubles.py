"""A hook that changes an output

kind: right
engine: torch
author: suite
says: The outputs of a layer are doubled by a hook of the author.
call: model, data=(X, CLASSES), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
model[0].register_forward_hook(lambda module, inputs, out: 2 * out)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
