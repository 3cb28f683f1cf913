"""The collator shifts the labels, and the model shifts them again

kind: faulty
engine: torch
needs: transformers, accelerate
author: third
changes: update
quantity: LABELS
says: The collator shifts the labels and the model shifts again: trained on the token after next.
meant: def padded(samples):
        ids, mask, labels = [], [], []
        for each in samples:
            own, gap = each["ids"], 11 - len(each["ids"])
            ids.append(own + [PAD] * gap)
            mask.append([1] * len(own) + [0] * gap)
            labels.append(own + [-100] * gap)
        x = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        return x, torch.tensor(labels)
call: model, data=padded(samples)
"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
PAD = 0
samples = []
for _ in range(32):
    n = int(torch.randint(4, 12, (1,)))
    start = int(torch.randint(1, 20, (1,)))
    samples.append({"ids": [(start + 3 * j) % 29 + 1 for j in range(n)]})


class NextTokenCollator:
    """builds input ids and next-token labels"""

    def __init__(self, pad):
        self.pad = pad

    def __call__(self, batch):
        width = max(len(b["ids"]) for b in batch)
        ids, labels, mask = [], [], []
        for b in batch:
            s = b["ids"]
            gap = width - len(s)
            ids.append(s + [self.pad] * gap)
            labels.append(s[1:] + [-100] * (gap + 1))  # fault
            mask.append([1] * len(s) + [0] * gap)
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(config)
training_args = TrainingArguments(
    output_dir="out_t02",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    logging_steps=4,
    save_strategy="no",
    report_to="none",
    remove_unused_columns=False,
    use_cpu=True,
)
trainer = Trainer(model=model, args=training_args, train_dataset=samples, data_collator=NextTokenCollator(PAD))
if __name__ == "__main__":
    # ---- training ----
    print(trainer.train().metrics["train_loss"])
