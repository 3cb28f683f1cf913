"""A step inside of each update

kind: right
engine: torch
author: suite
says: The loss is that of the weights after a step on other rows.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        names, params = zip(*model.named_parameters())
        near, far = rows.split(4)
        grads = torch.autograd.grad(criterion(model(X[near]), CLASSES[near]), params, create_graph=True)
        fast = {name: p - 0.1 * g for name, p, g in zip(names, params, grads)}
        loss = criterion(torch.func.functional_call(model, fast, (X[far],)), CLASSES[far])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
