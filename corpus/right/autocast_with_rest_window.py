"""Autocast, a scaler that is off, and a window for the rest

kind: right
engine: torch
author: third
says: The last window is divided by its own number of microbatches.
call: net, data=(X, Y), loss=mse
"""
# mixed precision template, runs anywhere
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
X = torch.randn(100, 16)
Y = X @ torch.randn(16, 2)
dl = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)
net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 2)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(dev, enabled=(dev == "cuda"))
mse = nn.MSELoss()
ACC = 2
# ---- training ----
for epoch in range(3):
    opt.zero_grad(set_to_none=True)
    n = len(dl)
    for i, (a, b) in enumerate(dl):
        window = min(ACC, n - i // ACC * ACC)
        with torch.autocast(dev, dtype=torch.bfloat16):
            pred = net(a.to(dev))
        loss = mse(pred.float(), b.to(dev)) / window
        scaler.scale(loss).backward()
        if (i + 1) % ACC == 0 or i + 1 == n:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
    print(epoch, loss.item() * window)
