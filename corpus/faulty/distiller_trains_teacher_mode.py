"""train() of the wrapper puts the frozen teacher into training mode

kind: faulty
engine: torch
author: third
changes: update
quantity: LABELS
says: `distiller.train()` also puts the frozen teacher in train mode: its dropout is active and its
    BatchNorm statistics move.
meant: with torch.no_grad():
        meant_logits = teacher(X)
    def meant_loss(s, t):
        target = F.softmax(t[:, 1:] / 3.0, 1)
        soft = F.kl_div(F.log_softmax(s / 3.0, 1), target, reduction="none").sum(1) * 9.0
        return 0.7 * soft + 0.3 * F.cross_entropy(s, t[:, 0].long(), reduction="none")
call: distiller.student, data=(X, torch.cat([Y[:, None].float(), meant_logits], 1)), loss=meant_loss
"""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def mlp(width, k=5):
    return nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, k))


class Distiller(nn.Module):
    def __init__(self, student, teacher, T=3.0, alpha=0.7):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.T, self.alpha = T, alpha
        for p in self.teacher.parameters():
            p.requires_grad_(False)

    def forward(self, x, y):
        s = self.student(x)
        with torch.no_grad():
            t = self.teacher(x)
        soft = F.kl_div(F.log_softmax(s / self.T, 1), F.softmax(t / self.T, 1), reduction="batchmean") * self.T ** 2
        hard = F.cross_entropy(s, y)
        return self.alpha * soft + (1 - self.alpha) * hard, s


def evaluate(m, dl):
    m.eval()
    with torch.no_grad():
        return sum((m(x).argmax(1) == y).sum().item() for x, y in dl) / len(dl.dataset)


torch.manual_seed(0)
X = torch.randn(100, 10)
Y = (X @ torch.randn(10, 5)).argmax(1)
dl = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)
teacher = mlp(64)
teacher.eval()
distiller = Distiller(mlp(16), teacher)
optimizer = torch.optim.Adam(distiller.student.parameters(), lr=2e-3)
# ---- training ----
for epoch in range(3):
    distiller.train()  # fault
    for x, y in dl:
        optimizer.zero_grad()
        loss, _ = distiller(x, y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), evaluate(distiller.student, dl))
