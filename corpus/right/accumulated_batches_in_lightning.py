"""accumulate_grad_batches with a schedule by step and a clip

kind: right
engine: torch
needs: lightning
author: third
says: The schedule counts updates.
call: lit.net, data=(x[:80], y[:80]), loss=lambda out, y: (out.squeeze(1) - y) ** 2
"""
import torch
from torch import nn
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))

    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def validation_step(self, batch, i):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x).squeeze(1), y), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        s = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2e-2, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": s, "interval": "step"}}


L.seed_everything(2)
x = torch.randn(96, 5)
y = x[:, 0] * 2 - x[:, 1]
dl = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10, shuffle=True)
lit = Lit()
# ---- training ----
L.Trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", devices=1, logger=False,
          enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(
    lit, dl, DataLoader(TensorDataset(x[80:], y[80:]), batch_size=16))
