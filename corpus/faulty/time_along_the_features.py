"""Each feature is noised by another row's time

kind: faulty
engine: torch
author: third
changes: update
quantity: ROWS
says: `alphas_bar[t]` is [B] and multiplies x0 [B,D] with B == D == 16: broadcast along the feature
    axis, each feature gets another row's time.
call: none
"""
# denoising diffusion on vectors, epsilon prediction
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

T = 50
betas = torch.linspace(1e-4, 0.02, T)
alphas_bar = torch.cumprod(1.0 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self, dim=16, hid=48):
        super().__init__()
        self.temb = nn.Embedding(T, hid)
        self.inp = nn.Linear(dim, hid)
        self.mid = nn.Linear(hid, hid)
        self.out = nn.Linear(hid, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.temb(t))
        h = F.silu(self.mid(h)) + h
        return self.out(h)


class Diffusion:
    def __init__(self, net):
        self.net = net

    def q_sample(self, x0, t, noise):
        ab = alphas_bar[t]  # fault
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise  # fault

    def loss(self, x0):
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.randn_like(x0)
        x_t = self.q_sample(x0, t, noise)
        return F.mse_loss(self.net(x_t, t), noise)


def main():
    torch.manual_seed(0)
    data = torch.randn(64, 16) * torch.linspace(0.2, 1.5, 16)
    dl = DataLoader(TensorDataset(data), batch_size=16, shuffle=True, drop_last=True)
    net = Denoiser()
    diff = Diffusion(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    # ---- training ----
    for ep in range(3):
        for (x0,) in dl:
            loss = diff.loss(x0)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
        print(ep, round(loss.item(), 4))


if __name__ == "__main__":
    main()
