"""The new classification layer stays frozen beside its adapters

kind: faulty
engine: torch
author: third
changes: update
quantity: HANDED_GRADIENT
says: The layer is called score, not classifier: the new classification layer stays frozen at its
    random start.
call: model, data=(ids, lab), loss=loss_fn
"""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


class Encoder(nn.Module):
    def __init__(self, vocab=30, d=24, n_labels=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.q, self.v = nn.Linear(d, d), nn.Linear(d, d)
        self.score = nn.Linear(d, n_labels)

    def forward(self, ids):
        h = self.emb(ids)
        h = h + torch.tanh(self.q(h)) * self.v(h)
        return self.score(h.mean(1))


def inject(model, names=("q", "v")):
    for n in names:
        setattr(model, n, LoRALinear(getattr(model, n)))


def mark_trainable(model):
    # adapters plus the classification layer
    for n, p in model.named_parameters():
        p.requires_grad = ("lora_" in n) or ("classifier" in n)  # fault


torch.manual_seed(4)
ids = torch.randint(0, 30, (90, 7))
lab = ids.sum(1) % 3
model = Encoder()
inject(model)
mark_trainable(model)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
dl = DataLoader(TensorDataset(ids, lab), batch_size=15, shuffle=True)
loss_fn = nn.CrossEntropyLoss()
# ---- training ----
for ep in range(3):
    tot = 0.0
    for b, t in dl:
        opt.zero_grad()
        loss = loss_fn(model(b), t)
        loss.backward()
        opt.step()
        tot += loss.item()
    print(ep, tot / len(dl))
