"""A penalty of the slopes of all outputs

kind: right
engine: torch
author: suite
says: `is_grads_batched` takes the slopes of both outputs in one call.
meant: import stepcheck
    def meant_loss(model, batch):
        x, y = batch
        out = model(x)
        (slopes,) = torch.autograd.grad(
            out, x, eye.expand(2, len(x), 2), is_grads_batched=True, create_graph=True
        )
        return {"error": (out - y) ** 2, "slopes": 0.1 * slopes.square().movedim(1, 0)}
call: model, data=(X, Y), loss=stepcheck.Objective(meant_loss)
"""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
X = torch.randn(24, 3)
Y = torch.randn(24, 2)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
eye = torch.eye(2)[:, None]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# ---- training ----
for epoch in range(2):
    for rows in torch.randperm(24).split(8):
        x = X[rows].requires_grad_()
        out = model(x)
        (slopes,) = torch.autograd.grad(out, x, eye.expand(2, len(x), 2), is_grads_batched=True, create_graph=True)
        loss = F.mse_loss(out, Y[rows]) + 0.1 * slopes.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
