import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

ACCUM = 4


def make_data():
    g = torch.Generator().manual_seed(31)
    x = torch.randn(122, 9, generator=g)
    y = torch.stack([x[:, 0] ** 2, x[:, 1] - x[:, 2]], 1) + 0.2 * torch.randn(122, 2, generator=g)
    return x, y


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 24), nn.Tanh(), nn.Linear(24, 2))
    loader = DataLoader(TensorDataset(*make_data()), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(3):
        for window in windows(loader, ACCUM):
            rows = sum(len(x) for x, _ in window)
            opt.zero_grad()
            for x, y in window:
                loss = nn.functional.mse_loss(model(x), y)
                (loss * len(x) / rows).backward()
            opt.step()
        print(epoch, f"{loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
