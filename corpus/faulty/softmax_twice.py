"""A softmax in the model, and again in the loss

kind: faulty
engine: torch
author: third
changes: update
quantity: LOSS_FORM
says: The model has a softmax, and CrossEntropyLoss applies log_softmax again.
call: model, data=(imgs, labels), loss=lambda p, y: F.nll_loss(torch.log(p), y, reduction="none")
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 12, 3, padding=1)
        self.fc1 = nn.Linear(12 * 4, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.softmax(x, dim=1)  # fault


def accuracy(model, loader):
    model.eval()
    good = n = 0
    with torch.no_grad():
        for x, y in loader:
            good += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    return good / n


torch.manual_seed(7)
imgs = torch.randn(96, 1, 8, 8)
labels = torch.randint(0, 10, (96,))
for i in range(96):
    imgs[i, 0, labels[i] % 8] += 2.0
train_loader = DataLoader(TensorDataset(imgs, labels), batch_size=16, shuffle=True)
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# ---- training ----
for epoch in range(3):
    model.train()
    running_loss = 0.0
    for i, data in enumerate(train_loader, 0):
        inputs, targets = data
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"[{epoch + 1}] loss: {running_loss / len(train_loader):.3f}")
print("train acc", accuracy(model, train_loader))
