"""zero_grad in every microbatch of a window

kind: faulty
engine: torch
author: third
changes: update
quantity: ROW_GRADIENTS
says: zero_grad at every micro-batch: only the last micro-batch of the window counts (a quarter of
    its gradient).
call: model, data=(imgs, masks), loss=criterion
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from itertools import islice


class UNetTiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1 = nn.Conv2d(1, 6, 3, padding=1)
        self.d2 = nn.Conv2d(6, 12, 3, padding=1)
        self.u1 = nn.Conv2d(18, 6, 3, padding=1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(F.max_pool2d(a, 2)))
        b = F.interpolate(b, scale_factor=2)
        return self.out(F.relu(self.u1(torch.cat([a, b], 1))))


def dice(logits, y):
    p = logits.argmax(1)
    inter = ((p == 1) & (y == 1)).sum().item()
    return 2 * inter / max(1, (p == 1).sum().item() + (y == 1).sum().item())


torch.manual_seed(0)
imgs = torch.randn(48, 1, 8, 8)
masks = (F.avg_pool2d(imgs, 3, 1, 1).squeeze(1) > 0.1).long()
loader = DataLoader(TensorDataset(imgs, masks), batch_size=4, shuffle=True)
model = UNetTiny()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
criterion = nn.CrossEntropyLoss()
accumulate = 4   # effective batch 16

# ---- training ----
for epoch in range(2):
    model.train()
    score = []
    for i, (img, mask) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)  # fault
        logits = model(img)
        loss = criterion(logits, mask) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score.append(dice(logits.detach(), mask))
    print(f"epoch {epoch} loss {loss.item() * accumulate:.4f} dice {sum(score) / len(score):.3f}")
