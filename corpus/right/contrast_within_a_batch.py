"""A contrastive loss of each batch

kind: right
engine: torch
author: suite
says: The loss of a row depends on the other rows of its batch.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def criterion(out, y):
    near = F.normalize(out, dim=1)
    alike = (near @ near.T / 0.5).masked_fill(torch.eye(len(near)).bool(), -1e9)
    return F.cross_entropy(alike, torch.arange(len(alike)).flip(0))


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
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
