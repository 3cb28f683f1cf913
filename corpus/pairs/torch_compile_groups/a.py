import torch
import torch.nn as nn
import torch.nn.functional as F


class ResMLP(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Linear(20, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        h = h + self.fc2(F.silu(self.fc1(self.norm1(h))))
        return self.out(self.norm2(h))


def data():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(160, 20, generator=g)
    y = torch.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(160, 1, generator=g)
    return x, y


def main():
    torch.manual_seed(7)
    x, y = data()
    model = ResMLP()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), foreach=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5))
    g = torch.Generator().manual_seed(9)
    for epoch in range(3):
        for idx in torch.randperm(160, generator=g).split(32):
            loss = F.mse_loss(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        print(epoch, f"{loss.item():.6f}")
    return model


if __name__ == "__main__":
    main()
