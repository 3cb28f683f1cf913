"""A class-balanced sampler and label smoothing in the Trainer

kind: right
engine: torch
needs: transformers, accelerate
author: third
says: Rows drawn with replacement are meant.
call: none
"""
# class-balanced sampler, label smoothing and group eval in HF Trainer
import numpy as np
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainingArguments


class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        z = self.f(x)
        out = {"logits": z}
        if labels is not None:
            out = {"loss": nn.functional.cross_entropy(z, labels, label_smoothing=0.1), **out}
        return out


class Balanced(Trainer):
    def _get_train_sampler(self, *a, **k):
        y = np.array([int(r["labels"]) for r in self.train_dataset])
        inv = 1.0 / np.bincount(y, minlength=3)
        return WeightedRandomSampler(torch.as_tensor(inv[y]), num_samples=len(y), replacement=True)


torch.manual_seed(0)
x = torch.randn(90, 10)
y = torch.cat([torch.zeros(60), torch.ones(20), 2 * torch.ones(10)]).long()
x[torch.arange(90), y] += 1.5
data = [{"x": a, "labels": b} for a, b in zip(x, y)]
args = TrainingArguments("out_t18", per_device_train_batch_size=9, num_train_epochs=2,
                         eval_strategy="epoch", logging_steps=5, save_strategy="no", report_to=[], learning_rate=3e-3,
                         use_cpu=True)
# ---- training ----
Balanced(model=Clf(), args=args, train_dataset=data, eval_dataset=data[:30]).train()
