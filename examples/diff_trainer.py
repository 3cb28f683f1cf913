"""Transformers' Trainer, once with batches of 8 rows and once with 4 microbatches of 2: are the
updates the same?

Rows have 3 to 12 tokens, so microbatches have other numbers of tokens, and other padding. Run it
with Transformers and PyTorch: `python diff_trainer.py`.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import stepcheck

PAD = 0
SIZES = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
QUIET = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def rows():
    """Return 32 rows of different lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 13, (32,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, 50, (num,), generator=draw)} for num in lengths]


def collated(batch):
    """Return a batch, padded to its longest row; padding has no label."""
    ids = [row["input_ids"] for row in batch]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    is_real = padded != PAD
    labels = torch.where(is_real, padded, -100)
    return {"input_ids": padded, "attention_mask": is_real.long(), "labels": labels}


def trained(num_microbatches, trainer=Trainer):
    """Return the trace of a training of 4 updates on 8 rows each."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **SIZES)
    )
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            per_device_train_batch_size=8 // num_microbatches,
            gradient_accumulation_steps=num_microbatches,
            num_train_epochs=1,
            use_cpu=True,
            seed=3,
            **QUIET,
        )
        made = trainer(model, options, train_dataset=rows(), data_collator=collated)
        with stepcheck.record() as trace:
            made.train()
    return trace


class MeanOfMeans(Trainer):
    """Divides each microbatch by its own number of tokens, as Trainer did before Transformers
    4.46.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over a microbatch's tokens."""
        outputs = model(**inputs)
        loss = outputs.loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def main():
    """Return both comparisons."""
    whole = trained(1)
    right = stepcheck.diff(trained(4), whole)
    wrong = stepcheck.diff(trained(4, MeanOfMeans), whole)
    print(f"Trainer:\n{right}\n\nA mean of means:\n{wrong}")
    print("You have seen: microbatches change no update of Trainer; a mean of their means does.")
    return right, wrong


if __name__ == "__main__":
    main()
