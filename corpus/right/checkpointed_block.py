"""A block whose outputs are computed again

kind: right
engine: torch
author: suite
says: The dropout masks of a checkpoint are the same in both passes.
call: model, data=(X, CLASSES), loss=criterion
"""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 4)
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x):
        return self.head(checkpoint(self.middle, self.first(x), use_reentrant=False))


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
