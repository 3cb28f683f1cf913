import torch
import torch.nn as nn
import torch.nn.functional as F


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = ((x[:, 0] * x[:, 1] + x[:, 2]) > 0).long()
    return x, y


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        acc = (model(x).argmax(1) == y).float().mean().item()
    return acc


def main():
    torch.manual_seed(12)
    x, y = make_data(96, 1)
    xv, yv = make_data(40, 2)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 2))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(6)
    model.train()
    for epoch in range(1, 5):
        for idx in torch.randperm(96, generator=g).split(16):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 2 == 0:
            print(epoch, f"validation accuracy {evaluate(model, xv, yv):.3f}")
    return model


if __name__ == "__main__":
    main()
