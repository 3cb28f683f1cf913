"""A distribution beside a value

kind: right
engine: torch
author: suite
says: The loss is a log probability and a square.
meant: import stepcheck
    def meant_loss(model, batch):
        rows, classes, values = batch
        policy, value = model(rows)
        return {"value": (value - values).square(), "policy": -policy.log_prob(classes)}
call: model, data=(X, CLASSES, Y), loss=stepcheck.Objective(meant_loss)
"""
import torch
from torch import nn
from torch.nn import functional as F


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        scores = self.head(features)
        return torch.distributions.Categorical(logits=scores), features[:, :1]


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
Y = torch.randn(24, 1)
model = Several()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        policy, value = model(X[rows])
        loss = F.mse_loss(value, Y[rows]) - policy.log_prob(CLASSES[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
