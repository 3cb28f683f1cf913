"""Logits are reshaped where they should be transposed

kind: faulty
engine: torch
author: third
changes: update
quantity: LOSS_FORM
says: Reshape instead of transpose: [B,T,V] is reinterpreted as [B,V,T], logits of other
    positions/classes are mixed.
meant: def rows(ids):
        return ids.reshape(B, -1, T).transpose(0, 1).reshape(-1, T)
    def meant_loss(outputs, labels):
        return nn.functional.cross_entropy(outputs[0].transpose(1, 2), labels, reduction="none")
call: model, data=(rows(xs), rows(ys)), loss=meant_loss
"""
# stateful char RNN
import torch
import torch.nn as nn


class CharRNN(nn.Module):
    def __init__(self, vocab, hid=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, 16)
        self.gru = nn.GRU(16, hid, batch_first=True)
        self.fc = nn.Linear(hid, vocab)

    def forward(self, x, h):
        o, h = self.gru(self.emb(x), h)
        return self.fc(o), h


text = "the quick brown fox jumps over the lazy dog. " * 12
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}
ids = torch.tensor([stoi[c] for c in text])
torch.manual_seed(0)
B, T = 4, 16
n = (len(ids) - 1) // (B * T) * (B * T)
xs = ids[:n].view(B, -1)
ys = ids[1:n + 1].view(B, -1)
model = CharRNN(len(vocab))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
criterion = nn.CrossEntropyLoss()
# ---- training ----
for epoch in range(3):
    hidden = torch.zeros(1, B, 32)
    for k in range(0, xs.size(1) - T + 1, T):
        x, y = xs[:, k:k + T], ys[:, k:k + T]
        optimizer.zero_grad()
        out, hidden = model(x, hidden)
        loss = criterion(out.reshape(B, -1, T), y)  # fault
        hidden = hidden.detach()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(epoch, loss.item())
