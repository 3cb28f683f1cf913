"""The length of the schedule is counted in microbatches

kind: faulty
engine: torch
needs: transformers, accelerate
author: third
changes: update
quantity: RATE
says: Total steps counted in micro-batches while the schedule is stepped per update (every 4): the
    rate never gets down to zero.
meant: import math
    def meant_rate(update):
        num = epochs * (len(data) // (bs * accum))
        first = int(0.1 * num)
        if update < first:
            return 5e-3 * update / max(1, first)
        return 5e-3 * 0.5 * (1 + math.cos(math.pi * (update - first) / max(1, num - first)))
call: model, data=data, learning_rate=meant_rate
"""
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup


class Toy(Dataset):
    def __init__(self, n=96, d=12):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, d, generator=g)
        self.y = (self.x[:, 0] - self.x[:, 1]).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x, labels=None):
        out = self.net(x)
        loss = nn.functional.mse_loss(out, labels) if labels is not None else None
        return {"loss": loss, "logits": out}


def main():
    torch.manual_seed(0)
    data = Toy()
    model = Regressor()
    epochs, bs, accum = 2, 8, 4
    # warm-up over the first 10 %, cosine to zero at the end of training
    total_steps = epochs * (len(data) // bs)  # fault
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(0.1 * total_steps), total_steps)
    args = TrainingArguments(output_dir="out_t04", num_train_epochs=epochs, per_device_train_batch_size=bs,
                             gradient_accumulation_steps=accum, logging_steps=1, save_strategy="no",
                             report_to=[], use_cpu=True)
    # ---- training ----
    Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, scheduler)).train()


if __name__ == "__main__":
    main()
