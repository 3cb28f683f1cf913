"""Validation leaves the averaged weights in the model

kind: faulty
engine: torch
author: third
changes: update
quantity: STATE
says: validate() writes the EMA weights into the model and never restores: training goes on from
    the averaged weights.
call: model, data=train_set, loss=nn.MSELoss()
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class EMA:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.backup = {}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            if n in self.shadow:
                self.shadow[n].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def apply_shadow(self, model):
        for n, p in model.named_parameters():
            if n in self.shadow:
                self.backup[n] = p.detach().clone()
                p.copy_(self.shadow[n])

    @torch.no_grad()
    def restore(self, model):
        for n, p in model.named_parameters():
            if n in self.backup:
                p.copy_(self.backup[n])
        self.backup = {}


class Runner:
    def __init__(self, model, opt, crit, ema):
        self.model, self.opt, self.crit, self.ema = model, opt, crit, ema
        self.step = 0

    def train_one(self, xb, yb):
        self.model.train()
        loss = self.crit(self.model(xb), yb)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.ema.update(self.model)
        self.step += 1
        return loss.item()

    def validate(self, dl):
        self.model.eval()
        self.ema.apply_shadow(self.model)  # fault
        with torch.no_grad():
            tot = sum(self.crit(self.model(x), t).item() * len(x) for x, t in dl)
        return tot / len(dl.dataset)

    def fit(self, train_dl, val_dl, epochs, val_every=3):
        for e in range(epochs):
            for xb, yb in train_dl:
                tr = self.train_one(xb, yb)
                if self.step % val_every == 0:
                    print(f"step {self.step} train {tr:.4f} ema-val {self.validate(val_dl):.4f}")


torch.manual_seed(0)
X = torch.randn(128, 8)
Y = torch.sin(X.sum(1, keepdim=True))
train_set, val_set = random_split(TensorDataset(X, Y), [96, 32], generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
runner = Runner(model, opt, nn.MSELoss(), EMA(model))
train_dl, val_dl = DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(val_set, batch_size=32)
# ---- training ----
runner.fit(train_dl, val_dl, epochs=3)
