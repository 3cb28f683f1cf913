import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(21)
        self.y = torch.randint(4, (84,), generator=g)
        self.x = torch.randn(84, 1, 8, 8, generator=g) * 0.7
        for i, label in enumerate(self.y):
            self.x[i, 0, 2 * label:2 * label + 2] += 1.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"image": self.x[i], "label": int(self.y[i])}


def collate(items):
    """Rows of one class next to each other."""
    items = sorted(items, key=lambda item: item["label"])
    return torch.stack([item["image"] for item in items]), torch.tensor([item["label"] for item in items])


def smoothed(logits, y, eps=0.1):
    logp = F.log_softmax(logits, dim=1)
    target = torch.full_like(logp, eps / logp.shape[1])
    target.scatter_(1, y[:, None], 1 - eps + eps / logp.shape[1])
    return -(target * logp).sum() / len(y)


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def main():
    torch.manual_seed(3)
    model = make_model()
    model.train()
    loader = DataLoader(Stripes(), batch_size=16, shuffle=True, num_workers=2, collate_fn=collate,
                        generator=torch.Generator().manual_seed(8))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=False)
    for epoch in range(3):
        for x, y in loader:
            loss = smoothed(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        print(epoch, f"{loss.item():.5f}")
    return model


if __name__ == "__main__":
    main()
