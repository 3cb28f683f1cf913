import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_dataset():
    g = torch.Generator().manual_seed(21)
    y = torch.randint(4, (84,), generator=g)
    x = torch.randn(84, 1, 8, 8, generator=g) * 0.7
    for i, label in enumerate(y):
        x[i, 0, 2 * label:2 * label + 2] += 1.0
    return TensorDataset(x, y)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def main():
    torch.manual_seed(3)
    model = make_model()
    loader = DataLoader(make_dataset(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(8))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(3):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()
        print(epoch, f"{loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
