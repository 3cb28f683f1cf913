"""An update of three batches, with a rate by update

kind: right
engine: torch
author: suite
says: The scheduler makes a step after each update.
call: model, data=(X, Y), loss=nn.MSELoss(),
    learning_rate=lambda n: 0.05 / (1 + n)
"""
import torch
from torch import nn

torch.manual_seed(1)
X = torch.randn(22, 3)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(22)
model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(6, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draws = torch.Generator().manual_seed(7)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
# ---- training ----
for epoch in range(3):
    model.train()
    batches = torch.randperm(22, generator=draws).split(4)
    for i, rows in enumerate(batches):
        num = sum(map(len, batches[i - i % 3 : i - i % 3 + 3]))
        loss = criterion(model(X[rows]).squeeze(-1), Y[rows])
        (loss * len(rows) / num).backward()
        if (i + 1) % 3 == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    model.eval()
    print(epoch, loss.item())
