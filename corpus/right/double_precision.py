"""Weights and inputs of float64

kind: right
engine: torch
author: suite
says: The data are stated as they are drawn, of float32.
call: model, data=(X, Y), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(20)
model = nn.Linear(3, 1).double()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    for inputs, labels in DataLoader(TensorDataset(X.double(), Y.double()), batch_size=4, shuffle=True):
        loss = criterion(model(inputs).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
