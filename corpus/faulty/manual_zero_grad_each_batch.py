"""Manual optimization clears the gradients at every batch

kind: faulty
engine: torch
needs: lightning
author: third
changes: update
quantity: ROW_GRADIENTS
says: zero_grad at every batch while stepping every second: half of the batches are thrown away.
call: model, data=(x, y), loss=nn.CrossEntropyLoss()
"""
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ManualNet(L.LightningModule):
    def __init__(self, n_accum=2, lr=0.05):
        super().__init__()
        self.automatic_optimization = False
        self.n_accum, self.lr = n_accum, lr
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        opt.zero_grad()  # fault
        loss = nn.functional.cross_entropy(self(x), y)
        self.manual_backward(loss / self.n_accum)
        if (batch_idx + 1) % self.n_accum == 0:
            self.clip_gradients(opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


L.seed_everything(0)
x = torch.randn(64, 8)
y = x[:, :3].argmax(1)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
model = ManualNet()
# ---- training ----
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
