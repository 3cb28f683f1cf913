"""A layer that is thawed, and added to the optimizer

kind: right
engine: torch
author: suite
says: The first pass trains the head alone.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
model[0].requires_grad_(False)
optimizer = torch.optim.Adam(model[2].parameters())
# ---- training ----
for epoch in range(4):
    if epoch == 2:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})
    for inputs, labels in DataLoader(TensorDataset(X, CLASSES), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
