"""A layer with a spectral norm

kind: right
engine: torch
author: suite
says: Its weight is made of another in each pass.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(X, CLASSES), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(X)
    print(epoch, loss.item())
