"""Labels as one-hot rows

kind: right
engine: torch
author: suite
says: The cross entropy takes probabilities as labels.
call: model, data=(X, LABELS), loss=criterion
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
LABELS = F.one_hot(torch.randint(0, 4, (20,)), 4).float()
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(X, LABELS), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(X)
    print(epoch, loss.item())
