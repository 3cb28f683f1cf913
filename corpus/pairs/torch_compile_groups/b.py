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


BASE_LR, WARMUP = 3e-3, 5


def main():
    torch.manual_seed(7)
    x, y = data()
    model = ResMLP()
    groups = []
    for name, p in model.named_parameters():
        plain = name.endswith("bias") or "norm" in name
        groups.append({"params": [p], "weight_decay": 0.0 if plain else 0.1})
    opt = torch.optim.AdamW(groups, lr=BASE_LR, betas=(0.9, 0.95), fused=True)
    fast = torch.compile(model, backend="aot_eager")
    g = torch.Generator().manual_seed(9)
    step = 0
    for epoch in range(3):
        for idx in torch.randperm(160, generator=g).split(32):
            for group in opt.param_groups:
                group["lr"] = BASE_LR * min(1.0, (step + 1) / WARMUP)
            for p in model.parameters():
                p.grad = None
            loss = (fast(x[idx]) - y[idx]).pow(2).mean()
            loss.backward()
            opt.step()
            step += 1
        print(epoch, f"{loss.item():.6f}")
    return model


if __name__ == "__main__":
    main()
