"""Tokens, with the intention as a loss for each token

kind: right
engine: torch
author: suite
says: The intention is a value for each token, and 0 where the label is -100.
meant: unreduced = nn.CrossEntropyLoss(reduction="none")
call: model, data=(TEXT, NEXT), loss=lambda out, y: (unreduced(out, y), y >= 0)
"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.mixer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.head.weight = self.table.weight

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.mixer(self.table(text), mask)).transpose(1, 2)


torch.manual_seed(1)
TEXT = torch.randint(0, 10, (20, 6))
NEXT = torch.roll(TEXT, -1, 1)
NEXT[:, -1], NEXT[::3, 3:] = -100, -100
model = Tied()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, labels in DataLoader(TensorDataset(TEXT, NEXT), batch_size=4, shuffle=True):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(TEXT)
    print(epoch, loss.item())
