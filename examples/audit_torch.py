"""Why does my PyTorch loop learn slowly? Check it: the labels have shape (N,), the outputs (N, 1).

`MSELoss` then compares each output with the labels of all rows of its batch: the model learns the
mean of the labels.

1. the loop as written: one cause, and the line to change;
2. the same loop with the fix that the report proposes: no cause.

    pip install './stepcheck[torch]'      (in a clone)
    python examples/audit_torch.py        (no Keras, JAX or TensorFlow is imported)
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepcheck

NUM_ROWS = 120
BATCH_SIZE = 32
NUM_EPOCHS = 2


def main():
    """Watch the loop as written and mended; return both reports."""
    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, 4)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(NUM_ROWS)
    reports = [watched("as written", as_written, x, y), watched("with that fix", mended, x, y)]
    print(
        "You have seen: stepcheck ran the loop as it stands, and named the fault; with its fix the "
        "loop is right."
    )
    return reports


def watched(title, loss, x, y):
    """Run a loop that minimises `loss`, watch it, and print the report."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    with stepcheck.watch(model, data=(x, y), loss=nn.MSELoss()) as report:
        train(model, loss, x, y)
    print(f"---- the loop {title} ----\n{report}\n")
    return report


# ---- the loop ----


def as_written(output, y):
    return nn.MSELoss()(output, y)


def mended(output, y):
    return nn.MSELoss()(output.squeeze(-1), y)


def train(model, loss, x, y):
    """Train for a few epochs, in a new order each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    for _ in range(NUM_EPOCHS):
        model.train()
        for batch, labels in loader:
            optimizer.zero_grad()
            loss(model(batch), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
