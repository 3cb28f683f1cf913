"""A dataset that returns rows one by one

kind: right
engine: torch
author: suite
says: The loader stacks the rows, and makes a tensor of the labels.
call: model, data=Rows(), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return X[i], int(CLASSES[i])


torch.manual_seed(1)
X = torch.randn(20, 3)
CLASSES = torch.randint(0, 4, (20,))
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    for inputs, labels in DataLoader(Rows(), batch_size=6, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
