"""A loop of PyTorch before and after it was rewritten, compared by saved traces; so are two
versions of a library.

The rewritten loop accumulates the gradients of 4 microbatches. A first draft forgot to divide by 4
in the last window.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import stepcheck

X = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * X[:, 1:2]
BATCH = 32
PARTS = 4


def network():
    """Return a small network, always with the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def before():
    """Train as the loop was: one batch for each update."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def after(*, is_draft=False):
    """Train as the loop is now: each update has several microbatches."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    parts = [*zip(X.split(BATCH // PARTS), Y.split(BATCH // PARTS), strict=True)]
    for i, (x, y) in enumerate(parts):
        loss = nn.functional.mse_loss(model(x), y)
        is_last_window = i >= len(parts) - PARTS
        (loss if is_draft and is_last_window else loss / PARTS).backward()
        if (i + 1) % PARTS == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    """Return the comparisons of the draft, and of the loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before.trace"
        with stepcheck.record() as trace:
            before()
        trace.save(path)  # in practice, before the change
        with stepcheck.record() as draft:
            after(is_draft=True)
        with stepcheck.record() as now:
            after()
        found = stepcheck.diff(draft, path), stepcheck.diff(now, path)
    print(f"The draft:\n{found[0]}\n\nThe loop:\n{found[1]}")
    print(
        "You have seen: a rewritten loop is compared with a trace of the loop before, update by "
        "update."
    )
    return found


if __name__ == "__main__":
    main()
