"""Labels among the named inputs, as BERT has them

kind: right
engine: torch
author: suite
says: The model computes its loss of them.
call: model, data=(INPUTS, Y), loss=lambda out, y: (out["scores"][:, :1] - y).square().mean(1)
"""
import torch
from torch import nn
from torch.nn import functional as F


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, input_ids, attention_mask, token_type_ids, labels=None):
        mask = attention_mask[..., None]
        scores = self.head(((self.table(input_ids) + token_type_ids[..., None]) * mask).sum(1) / mask.sum(1))
        return {"scores": scores, "loss": F.mse_loss(scores[:, :1], labels)}


torch.manual_seed(1)
Y = torch.randn(24, 1)
INPUTS = {"input_ids": torch.randint(0, 10, (24, 7)), "attention_mask": torch.ones(24, 7, dtype=torch.long)}
INPUTS["token_type_ids"] = torch.zeros(24, 7, dtype=torch.long)
model = Marked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = model(**{name: part[rows] for name, part in INPUTS.items()}, labels=Y[rows])["loss"]
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
