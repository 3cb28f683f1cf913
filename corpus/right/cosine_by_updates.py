"""A cosine over the updates

kind: right
engine: torch
author: suite
says: The scheduler makes a step after each update.
meant: import math
call: model, data=(X, CLASSES), loss=criterion,
    learning_rate=lambda n: 0.05 * (1 + math.cos(math.pi * n / 12))
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(X, CLASSES), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        model(X)
    print(epoch, loss.item())
