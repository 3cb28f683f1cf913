"""The optimizer is not prepared: it steps at every microbatch

kind: faulty
engine: torch
needs: accelerate
author: third
changes: update
quantity: ROW_GRADIENTS
says: The optimizer is not prepared: it steps and clears at every micro-batch with half gradients,
    no accumulation happens.
call: model, data=train_dl.dataset, loss=loss_fn
"""
# accelerate image-ish classifier
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed


def get_dataloaders(bs):
    x = torch.randn(96, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    return DataLoader(TensorDataset(x[:80], y[:80]), bs, shuffle=True), DataLoader(TensorDataset(x[80:], y[80:]), bs)


def training_function(config):
    set_seed(config["seed"])
    acc = Accelerator(cpu=True, gradient_accumulation_steps=config["accum"])
    train_dl, eval_dl = get_dataloaders(config["bs"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, train_dl, eval_dl = acc.prepare(model, train_dl, eval_dl)  # fault
    loss_fn = nn.CrossEntropyLoss()
    # ---- training ----
    for epoch in range(config["epochs"]):
        model.train()
        total = 0.0
        for step, (x, y) in enumerate(train_dl):
            with acc.accumulate(model):
                loss = loss_fn(model(x), y)
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach().float()
        model.eval()
        correct = 0
        for x, y in eval_dl:
            with torch.no_grad():
                p = model(x).argmax(-1)
            p, y = acc.gather_for_metrics((p, y))
            correct += (p == y).sum().item()
        acc.print(f"epoch {epoch}: loss {total / len(train_dl):.4f} acc {correct / len(eval_dl.dataset):.3f}")


if __name__ == "__main__":
    training_function({"lr": 3e-3, "epochs": 2, "bs": 8, "accum": 2, "seed": 42})
