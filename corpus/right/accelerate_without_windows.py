"""Accelerate, with an update for each batch

kind: right
engine: torch
needs: accelerate
author: suite
says: The prepared optimizer steps in each batch.
call: model, data=(x, y), loss=nn.MSELoss()
"""
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = torch.randn(44, 3), torch.randn(44)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
accelerator = Accelerator(gradient_accumulation_steps=1, cpu=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
# ---- training ----
for epoch in range(3):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs).squeeze(-1), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
