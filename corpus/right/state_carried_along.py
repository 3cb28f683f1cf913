"""A state that is carried from batch to batch

kind: right
engine: torch
author: suite
says: The rows come in their order, and the state is cut off after each batch.
call: model, data=(x, y), loss=lambda out, y: (out[0] - y) ** 2
"""
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x, state=None):
        out, state = self.rnn(x, state)
        return self.head(out[:, -1])[:, 0], state


torch.manual_seed(1)
x, y = torch.randn(64, 5, 3), torch.randn(64)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# ---- training ----
for epoch in range(4):
    state = None
    for rows in torch.arange(64).split(16):
        out, state = model(x[rows], state)
        loss = F.mse_loss(out, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()
    print(epoch, loss.item())
