"""Lightning, with an update for each batch

kind: right
engine: torch
needs: lightning
author: suite
says: The trainer steps in each batch.
call: lit.net, data=(x, y), loss=nn.MSELoss()
"""
import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, i):
        return F.mse_loss(self(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


torch.manual_seed(1)
x, y = torch.randn(44, 3), torch.randn(44)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
lit = Lit()
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", accumulate_grad_batches=1, **silent)
# ---- training ----
trainer.fit(lit, loader)
print(trainer.global_step)
