"""The loader is built on the whole data set

kind: faulty
engine: torch
author: third
changes: update
quantity: ROWS
says: The loader is built on the full data set: the validation rows are trained on.
call: model, data=train_ds, loss=criterion
"""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
full_x = torch.randn(150, 7)
full_y = (full_x @ torch.randn(7, 1)).squeeze(1) + 0.05 * torch.randn(150)
dataset = TensorDataset(full_x, full_y)
train_ds, val_ds = random_split(dataset, [120, 30])

train_loader = DataLoader(dataset, batch_size=30, shuffle=True)  # fault
val_loader = DataLoader(val_ds, batch_size=30)


class Reg(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(7, 24)
        self.l2 = nn.Linear(24, 1)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x))).squeeze(-1)


model = Reg()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
best = 1e9
# ---- training ----
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(criterion(model(x), y).item() * len(y) for x, y in val_loader) / len(val_ds)
    best = min(best, val)
    print(f"epoch {epoch}: train {loss.item():.4f}  val {val:.4f}  best {best:.4f}")
