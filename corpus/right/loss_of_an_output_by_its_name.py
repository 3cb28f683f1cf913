"""A model that returns a dict, with a loss of one entry

kind: right
engine: torch
author: suite
says: The features are returned beside the scores.
call: model, data=(X, CLASSES), loss=lambda out, y: criterion(out["scores"], y)
"""
import torch
from torch import nn


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        scores = self.head(features)
        return {"scores": scores, "features": features}


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
model = Several()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        optimizer.zero_grad()
        loss = criterion(model(X[rows])["scores"], CLASSES[rows])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
