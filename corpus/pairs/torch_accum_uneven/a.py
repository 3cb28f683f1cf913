import torch
import torch.nn as nn
import torch.nn.functional as F


def make_data():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(100, 12, generator=g)
    w = torch.randn(12, 5, generator=g)
    y = (x @ w + 0.3 * torch.randn(100, 5, generator=g)).argmax(1)
    return x, y


def main():
    torch.manual_seed(0)
    x, y = make_data()
    model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=15)
    order = torch.Generator().manual_seed(5)
    for epoch in range(3):
        perm = torch.randperm(len(x), generator=order)
        for idx in perm.split(24):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            opt.step()
            sched.step()
        print(f"epoch {epoch} loss {loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
