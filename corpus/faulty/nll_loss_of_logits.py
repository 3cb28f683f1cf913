"""nll_loss of logits, without log_softmax

kind: faulty
engine: torch
needs: lightning
author: third
changes: update
quantity: LOSS_FORM
says: `nll_loss` on raw logits (no log_softmax): unbounded loss.
call: model, data=tr, loss=nn.CrossEntropyLoss()
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from lightning.pytorch import LightningModule, Trainer, seed_everything


class LitMNISTLike(LightningModule):
    def __init__(self, hidden=24, lr=2e-3):
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)  # fault
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


seed_everything(3)
x = torch.randn(120, 1, 8, 8)
y = torch.randint(0, 10, (120,))
x[torch.arange(120), 0, 0, y % 8] += 3
tr, va = random_split(TensorDataset(x, y), [96, 24])
trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
model = LitMNISTLike()
# ---- training ----
trainer.fit(model, DataLoader(tr, batch_size=16, shuffle=True), DataLoader(va, batch_size=24))
print(trainer.callback_metrics)
