"""A moving average of the weights, beside the training

kind: right
engine: torch
author: suite
says: The average is a copy, which the training never reads.
call: model, data=(X, CLASSES), loss=criterion
"""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
average = copy.deepcopy(model)
# ---- training ----
for epoch in range(2):
    for inputs, labels in DataLoader(TensorDataset(X, CLASSES), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, new in zip(average.parameters(), model.parameters()):
                own.lerp_(new, 0.1)
            average(X)
    print(epoch, loss.item())
