"""A dataset that adds noise to each row

kind: right
engine: torch
author: suite
says: The model is given other rows in each pass.
call: model, loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {"id": i, "x": x[i] + 0.1 * torch.randn(4), "y": int(y[i] > 0)}


torch.manual_seed(1)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    model.train()
    for batch in DataLoader(Noisy(), 15, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(x)
    print(epoch, loss.item())
