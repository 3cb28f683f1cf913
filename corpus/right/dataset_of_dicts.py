"""A dataset whose rows are dicts

kind: right
engine: torch
author: suite
says: The loop stacks them, labels too.
call: model, data=(INPUTS, Y), loss=lambda out, y: (out["scores"][:, :1] - y).square().mean(1)
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, input_ids, attention_mask, token_type_ids, labels=None):
        mask = attention_mask[..., None]
        scores = self.head(((self.table(input_ids) + token_type_ids[..., None]) * mask).sum(1) / mask.sum(1))
        return {"scores": scores, "loss": F.mse_loss(scores[:, :1], labels)}


class Items(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return {name: part[i] for name, part in INPUTS.items()} | {"labels": Y[i]}


torch.manual_seed(1)
Y = torch.randn(24, 1)
INPUTS = {"input_ids": torch.randint(0, 10, (24, 7)), "attention_mask": torch.ones(24, 7, dtype=torch.long)}
INPUTS["token_type_ids"] = torch.zeros(24, 7, dtype=torch.long)
model = Marked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for batch in DataLoader(Items(), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
