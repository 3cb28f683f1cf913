import torch
import torch.nn as nn
import torch.nn.functional as F


@torch.no_grad()
def shrink(model, factor):
    """Shrink the weights once, halfway, to stay plastic."""
    for p in model.parameters():
        if p.ndim > 1:
            p.mul_(factor)


def main():
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(18)
    x = torch.randn(128, 14, generator=g)
    y = (x @ torch.randn(14, 3, generator=g)).argmax(1)
    model = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=6, gamma=0.7)
    step = 0
    while step < 18:
        for idx in torch.randperm(128, generator=g).split(32):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step == 9:
                shrink(model, 0.8)
            if step == 18:
                break
        print(step, f"{loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
