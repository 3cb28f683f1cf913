"""Sequences are sorted by length in the collate, labels are not

kind: faulty
engine: torch
author: third
changes: update
quantity: LABELS
says: The sequences are sorted by length in the collate, the labels are not: labels belong to
    other sequences.
meant: def padded(items):
        x = pad_sequence([each for each, _ in items], batch_first=True)
        lengths = torch.tensor([len(each) for each, _ in items])
        return (x, lengths), torch.tensor([label for _, label in items])
call: model, data=padded(loader.dataset.items), loss=criterion
"""
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Seqs(Dataset):
    """variable length sequences, binary label: is the sum positive?"""

    def __init__(self, n=72):
        self.items = []
        for _ in range(n):
            x = torch.randn(int(torch.randint(3, 12, (1,))), 5)
            self.items.append((x, float(x[:, 0].sum() > 0)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    xs, ys = zip(*batch)
    xs = sorted(xs, key=len, reverse=True)  # fault
    lengths = torch.tensor([len(x) for x in xs])
    return pad_sequence(xs, batch_first=True), lengths, torch.tensor(ys)


class LSTMClassifier(nn.Module):
    def __init__(self, d=5, h=16):
        super().__init__()
        self.rnn = nn.LSTM(d, h, batch_first=True)
        self.fc = nn.Linear(h, 1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        _, (h, _) = self.rnn(packed)
        return self.fc(h[-1]).squeeze(1)


def run_epoch(model, loader, criterion, optimizer):
    model.train()
    loss_sum = n = 0
    for x, lengths, y in loader:
        optimizer.zero_grad()
        out = model(x, lengths)
        loss = criterion(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        loss_sum += loss.item() * len(y)
        n += len(y)
    return loss_sum / n


torch.manual_seed(0)
loader = DataLoader(Seqs(), batch_size=12, shuffle=True, collate_fn=collate)
model = LSTMClassifier()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
# ---- training ----
for epoch in range(3):
    print("epoch", epoch, run_epoch(model, loader, criterion, optimizer))
