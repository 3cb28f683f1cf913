"""Sample weights are normalised over the whole window

kind: right
engine: torch
author: third
says: Rows count by their weight in the whole window.
call: net, data=(ds.x, ds.y, ds.w), loss=nn.BCEWithLogitsLoss()
"""
# sample weights, normalised over the whole accumulation window; loader with workers and a dict collate
import itertools
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Weighted(Dataset):
    def __init__(self, n=84):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 8, generator=g)
        self.y = (self.x.sum(1) > 0.5).float()
        self.w = torch.rand(n, generator=g) * 2 + 0.1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return dict(x=self.x[i], y=self.y[i], w=self.w[i])


def collate(items):
    return {k: torch.stack([it[k] for it in items]) for k in items[0]}


def windows(it, k):
    it = iter(it)
    while chunk := list(itertools.islice(it, k)):
        yield chunk


def main():
    torch.manual_seed(0)
    ds = Weighted()
    dl = DataLoader(ds, batch_size=8, shuffle=True, collate_fn=collate, num_workers=2)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    bce = nn.BCEWithLogitsLoss(reduction="none")
    # ---- training ----
    for epoch in range(2):
        for chunk in windows(dl, 3):
            total_w = sum(b["w"].sum() for b in chunk)
            opt.zero_grad()
            shown = 0.0
            for b in chunk:
                loss = (bce(net(b["x"]), b["y"]) * b["w"]).sum() / total_w
                loss.backward()
                shown += loss.item()
            opt.step()
        print(epoch, shown)


if __name__ == "__main__":
    main()
