"""A GPT on padded sentences: each microbatch's mean over its own tokens

kind: faulty
engine: torch
author: third
changes: update
quantity: ROW_GRADIENTS
says: The mean over each micro-batch's own tokens, divided by the number of micro-batches: tokens of
    micro-batches with few targets weigh more than in the whole batch.
call: model, data=(xs, ys),
    loss=lambda logits, t: (F.cross_entropy(logits.mT, t, ignore_index=-1, reduction="none"), t != -1)
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 28
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.n_head = c.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = CausalSelfAttention(c)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.h:
            x = b(x)
        return self.lm_head(self.ln_f(x))


PAD = 0
torch.manual_seed(1337)
N = 96
lens = torch.randint(3, 17, (N,))
seqs = torch.randint(1, 28, (N, 17))
for i, n in enumerate(lens):
    seqs[i, n + 1:] = PAD
xs, ys = seqs[:, :-1].contiguous(), seqs[:, 1:].clone()
ys[ys == PAD] = -1

batch_size, grad_accum = 4, 4
max_iters = 12
learning_rate, min_lr, warmup = 1e-3, 1e-4, 2


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    r = (it - warmup) / (max_iters - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * r)) * (learning_rate - min_lr)


model = GPT(GPTConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
ptr = 0
# ---- training ----
for it in range(max_iters):
    for g in optimizer.param_groups:
        g["lr"] = get_lr(it)
    total = 0.0
    for micro in range(grad_accum):
        ix = torch.arange(ptr, ptr + batch_size) % N
        ptr = (ptr + batch_size) % N
        logits = model(xs[ix])
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), ys[ix].view(-1), ignore_index=-1)  # fault
        loss = loss / grad_accum  # fault
        total += loss.item()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {total:.4f}")
