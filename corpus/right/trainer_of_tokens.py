"""Trainer of Transformers, with tokens and accumulation

kind: right
engine: torch
needs: transformers, accelerate
author: suite
says: The trainer gives the number of tokens of three batches to the model.
meant: def meant_loss(out, y):
        values = torch.nn.functional.cross_entropy(out.logits[:, :-1].mT, y[:, 1:], reduction="none")
        return values, y[:, 1:] != -100
call: model, data=({"input_ids": ids}, labels), loss=meant_loss
"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(1)
ids, num = torch.randint(3, 50, (36, 9)), torch.randint(3, 9, (36,))
labels = torch.where(torch.arange(9) < num[:, None], ids, -100)
rows = [{"input_ids": ids[i], "labels": labels[i]} for i in range(36)]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **SIZES))
options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 1.0}
options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 3}
trainer = Trainer(model, TrainingArguments("out", **options), train_dataset=rows)
# ---- training ----
print(trainer.train().metrics["train_loss"])
