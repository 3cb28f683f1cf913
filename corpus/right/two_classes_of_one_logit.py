"""Two classes, by one logit

kind: right
engine: torch
author: suite
says: The labels have the shape of the outputs, and positive ones count twice.
call: model, data=(X, POSITIVE), loss=criterion
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X = torch.randn(20, 3)
POSITIVE = (torch.rand(20, 1) < 0.5).float()
model = nn.Linear(3, 1)
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(X, POSITIVE), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(X)
    print(epoch, loss.item())
