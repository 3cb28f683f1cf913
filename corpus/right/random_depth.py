"""A layer that is left out at random

kind: right
engine: torch
author: suite
says: NumPy's and Python's generators decide in training mode.
call: model, data=(X, CLASSES), loss=criterion
"""
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.kept = []

    def forward(self, x):
        found = self.first(x)
        if not self.training or (np.random.rand() < 0.5) ^ (random.random() < 0.5):
            found = found + self.middle(found)
        self.kept = [found] if self.training else self.kept
        return self.head(found)


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = Model()
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
