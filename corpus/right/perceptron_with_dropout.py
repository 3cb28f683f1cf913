"""A perceptron with statistics and dropout

kind: right
engine: torch
author: suite
says: One batch an update, an evaluation after each pass, and a mean over all rows that is printed.
call: model, data=(X, Y), loss=nn.MSELoss(), rows="shuffled"
printed: loss=shown
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
shown = []
# ---- training ----
for epoch in range(3):
    model.train()
    total = 0.0
    for rows in torch.randperm(22, generator=draws).split(4):
        loss = criterion(model(X[rows]).squeeze(-1), Y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * len(rows)
    model.eval()
    with torch.no_grad():
        model(X)
    shown.append(total / 22)
    print(epoch, shown[-1])
