"""accumulate() with the clip behind sync_gradients

kind: right
engine: torch
needs: accelerate
author: third
says: The prepared optimizer steps once per window.
call: model, data=(X, Y), loss=loss_function
"""
import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
X = torch.randn(96, 10)
Y = X[:, :4].argmax(1)
loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
steps = 2 * -(-len(loader) // 4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / steps))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
loss_function = nn.CrossEntropyLoss()
# ---- training ----
for epoch in range(2):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(epoch, loss.item(), scheduler.get_last_lr())
