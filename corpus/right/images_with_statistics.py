"""A convolution with statistics, dropout, momentum and decay

kind: right
engine: torch
author: suite
says: Training mode in each pass, inference mode for the evaluation.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 1, 8, 8)
CLASSES = torch.randint(0, 4, (20,))
layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5)
model = nn.Sequential(*layers, nn.Linear(27, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
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
