"""Two hundred labels of a row, with a mask

kind: right
engine: torch
author: suite
says: Masked places count nothing, and the mean is over all places.
meant: def meant_loss(out, y):
        labels, mask = y.unbind(2)
        values = F.binary_cross_entropy_with_logits(out, labels, reduction="none")
        return (values * mask).mean(1)
call: model, data=(X, torch.stack([Y, MASK], 2)), loss=meant_loss
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X, Y = torch.randn(24, 3), torch.rand(24, 200).round()
MASK = torch.rand(24, 200).round()
model = nn.Linear(3, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows], weight=MASK[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
