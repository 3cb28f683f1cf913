"""A graph, all of whose nodes are given

kind: right
engine: torch
author: suite
says: The loss is of each second node.
call: model, data=(X, CLASSES, torch.arange(24) % 2 == 0), loss=nn.CrossEntropyLoss()
"""
import torch
from torch import nn
from torch.nn import functional as F


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 4)

    def forward(self, x, edges):
        return self.dense(x).index_add(0, edges[0], x[edges[1]].sum(1, keepdim=True).expand(-1, 4))


torch.manual_seed(1)
X = torch.randn(24, 3)
CLASSES = torch.randint(0, 4, (24,))
EDGES = torch.randint(24, (2, 40))
TRAIN = torch.arange(0, 24, 2)
model = Graph()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(6):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X, EDGES)[TRAIN], CLASSES[TRAIN])
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
