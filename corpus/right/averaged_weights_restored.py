"""Averaged weights are lent to the evaluation and taken back

kind: right
engine: torch
author: third
says: Weights and mode are as before after each evaluation.
call: net, data=(X[:96], Y[:96]), loss=loss_fn
"""
import contextlib
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(128, 9)
Y = (X[:, :3].prod(1) > 0).long()
train_dl = DataLoader(TensorDataset(X[:96], Y[:96]), 16, shuffle=True)
val_dl = DataLoader(TensorDataset(X[96:], Y[96:]), 32)
net = nn.Sequential(nn.Linear(9, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5))
loss_fn = nn.CrossEntropyLoss()


@contextlib.contextmanager
def ema_weights():
    keep = {k: v.detach().clone() for k, v in net.state_dict().items()}
    net.load_state_dict(ema.module.state_dict())
    was = net.training
    net.eval()
    try:
        yield net
    finally:
        net.load_state_dict(keep)
        net.train(was)


net.train()
step = 0
# ---- training ----
for ep in range(3):
    for xb, yb in train_dl:
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        warm.step()
        ema.update_parameters(net)
        step += 1
        if step % 4 == 0:
            with ema_weights() as m, torch.no_grad():
                v = sum(loss_fn(m(a), b).item() * len(a) for a, b in val_dl) / 32
            print(step, loss.item(), v)
