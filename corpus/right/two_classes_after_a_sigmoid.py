"""Two classes, by a probability

kind: right
engine: torch
author: suite
says: Outputs are squeezed and labels cast before the loss.
call: model, data=(X, POSITIVE), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
POSITIVE = torch.randint(0, 2, (20,))
model = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(X, POSITIVE), batch_size=4, shuffle=True):
        loss = criterion(model(inputs).squeeze(1), labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(X)
    print(epoch, loss.item())
