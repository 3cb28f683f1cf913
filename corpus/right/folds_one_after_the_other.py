"""Two models, each of one half of the rows

kind: right
engine: torch
author: suite
says: The first fold is judged.
call: models[0], data=(x[::2], y[::2]), loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

torch.manual_seed(1)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
models = nn.Linear(4, 1), nn.Linear(4, 1)
# ---- training ----
for fold, model in enumerate(models):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.arange(60)[torch.arange(60) % 2 == fold].tolist()
    for epoch in range(3):
        for inputs, labels in DataLoader(TensorDataset(x, y), 10, sampler=SubsetRandomSampler(rows)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs)[:, 0], labels)
            loss.backward()
            optimizer.step()
        print(fold, epoch, loss.item())
