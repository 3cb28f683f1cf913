"""Gradients of a window are divided by its tokens

kind: right
engine: torch
author: third
says: All tokens of a window count alike.
call: lm, data=(x, y),
    loss=lambda logits, t: (F.cross_entropy(logits.mT, t, ignore_index=IGN, reduction="none"), t != IGN)
"""
# language model, padded batches, accumulation normalised by the tokens of the whole window
import torch
import torch.nn as nn
import torch.nn.functional as F

IGN = -100
torch.manual_seed(0)
N, T, V = 60, 12, 25
seq = torch.randint(0, V, (N, T + 1))
x, y = seq[:, :-1].clone(), seq[:, 1:].clone()
for i in range(N):
    k = int(torch.randint(2, T + 1, (1,)))
    y[i, k:] = IGN


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, 24)
        self.r = nn.GRU(24, 24, batch_first=True)
        self.o = nn.Linear(24, V)

    def forward(self, t):
        return self.o(self.r(self.e(t))[0])


lm = LM()
opt = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0.0)
MB, ACC = 6, 4


def apply(tokens):
    for p in lm.parameters():
        p.grad.div_(tokens)
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


# ---- training ----
for epoch in range(3):
    order = torch.randperm(N)
    tokens = pending = 0
    total = seen = 0.0
    for k in range(0, N, MB):
        j = order[k:k + MB]
        nll = F.cross_entropy(lm(x[j]).transpose(1, 2), y[j], ignore_index=IGN, reduction="sum")
        nll.backward()
        m = int((y[j] != IGN).sum())
        tokens += m
        total += nll.item()
        seen += m
        pending += 1
        if pending == ACC:
            apply(tokens)
            tokens = pending = 0
    if pending:
        apply(tokens)
    print(f"epoch {epoch} nll/token {total / seen:.4f}")
