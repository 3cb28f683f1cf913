import torch
import torch.nn as nn
import torch.nn.functional as F


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(13)
    x = torch.randn(120, 16, generator=g)
    y = (x[:, :3].sum(1) > 0).float()[:, None]
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    for epoch in range(4):
        for idx in torch.randperm(120, generator=g).split(30):
            opt.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x[idx]), y[idx])
            loss.backward()
            opt.step()
        print(epoch, f"{loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
