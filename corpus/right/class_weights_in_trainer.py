"""compute_loss_func with class weights

kind: right
engine: torch
needs: transformers, accelerate
author: third
says: The sum over the window is divided by its number of rows.
meant: def rows_of(data):
        names = "input_ids", "attention_mask"
        x = {name: torch.stack([each[name] for each in data]) for name in names}
        return x, torch.tensor([each["labels"] for each in data])
    def meant_loss(outputs, labels):
        return F.cross_entropy(outputs["logits"], labels, weight=W, reduction="none")
call: model, data=rows_of(tr.train_dataset), loss=meant_loss
"""
# compute_loss_func with class weights, evaluation every few steps
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(5)
W = torch.tensor([1.0, 3.0])


def weighted_ce(outputs, labels, num_items_in_batch=None):
    per = F.cross_entropy(outputs.logits, labels, weight=W, reduction="none")
    return per.sum() / num_items_in_batch if num_items_in_batch is not None else per.mean()


def make(n):
    ids = torch.randint(3, 50, (n, 8))
    y = (ids[:, 0] > 40).long()
    return [{"input_ids": i, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(l)} for i, l in zip(ids, y)]


model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                                 intermediate_size=32, max_position_embeddings=16, num_labels=2))
args = TrainingArguments("out_t12", per_device_train_batch_size=6, gradient_accumulation_steps=2, num_train_epochs=2,
                         eval_strategy="steps", eval_steps=2, logging_steps=2, save_strategy="no", report_to=[],
                         learning_rate=1e-3, use_cpu=True)
tr = Trainer(model=model, args=args, train_dataset=make(48), eval_dataset=make(16), compute_loss_func=weighted_ce,
             compute_metrics=lambda p: {"acc": float((p.predictions.argmax(-1) == p.label_ids).mean())})
# ---- training ----
tr.train()
