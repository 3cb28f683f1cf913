"""Double DQN with priorities and a soft target

kind: right
engine: torch
author: third
says: The target takes no gradient, and the weights of rows are meant.
call: none
"""
# double DQN with soft target updates and prioritised weights
import copy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
        self.a = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, s):
        a = self.a(s)
        return self.v(s) + a - a.mean(1, keepdim=True)


torch.manual_seed(0)
rng = np.random.default_rng(0)
q = Q()
qt = copy.deepcopy(q).requires_grad_(False)
opt = torch.optim.Adam(q.parameters(), lr=1e-3, eps=1.5e-4)
S, S2 = torch.randn(200, 4), torch.randn(200, 4)
Aa = torch.randint(0, 3, (200, 1))
R, Dn = torch.randn(200, 1), (torch.rand(200, 1) < 0.1).float()
prio = np.ones(200)
# ---- training ----
for it in range(15):
    pr = prio ** 0.6 / (prio ** 0.6).sum()
    idx = rng.choice(200, 32, p=pr)
    w = torch.tensor((200 * pr[idx]) ** -0.4, dtype=torch.float32)
    w = (w / w.max()).unsqueeze(1)
    with torch.no_grad():
        best = q(S2[idx]).argmax(1, keepdim=True)
        tgt = R[idx] + 0.99 * (1 - Dn[idx]) * qt(S2[idx]).gather(1, best)
    cur = q(S[idx]).gather(1, Aa[idx])
    td = tgt - cur
    loss = (w * F.smooth_l1_loss(cur, tgt, reduction="none")).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q.parameters(), 10)
    opt.step()
    prio[idx] = td.detach().abs().squeeze(1).numpy() + 1e-3
    with torch.no_grad():
        for p, t in zip(q.parameters(), qt.parameters()):
            t.lerp_(p, 0.01)
print(loss.item())
