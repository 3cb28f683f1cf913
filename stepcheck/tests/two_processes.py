"""Loops in two processes of gloo; run as a script, each process writes what it has of each."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stepcheck
from stepcheck.torch import processes

NUM, EPOCHS = 2, 3  # processes, passes
draw = torch.Generator().manual_seed(1)
X = torch.randn(48, 5, generator=draw)
Y = X @ torch.randn(5, 1, generator=draw) + 0.1 * torch.randn(
    48, 1, generator=draw
)
MSE = nn.MSELoss()


def averaged(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= NUM


class Squares:
    """A regression as the tutorial of `DistributedDataParallel` has it, with dropout and statistics."""

    def __init__(self, rank, *, seed=0, sync=None):
        torch.manual_seed(seed)
        parts = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()
        self.model = nn.Sequential(nn.Linear(5, 8), *parts, nn.Linear(8, 1))
        self.called = (
            self.model if sync else DistributedDataParallel(self.model)
        )
        self.sync = sync
        torch.manual_seed(rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        data = TensorDataset(X, Y)
        self.sampler = DistributedSampler(data, NUM, rank)
        self.loader = DataLoader(data, 4, sampler=self.sampler)

    def train(self):
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                MSE(self.called(x), y).backward()
                if self.sync:
                    self.sync(self.model)
                self.optimizer.step()


LOOPS = {
    "right": Squares,
    "other weights": lambda rank: Squares(rank, seed=rank, sync=averaged),
}


def same_bits(name, rank):
    """Return the report on a loop, and whether it trains the same bits without."""
    loop, bare = (LOOPS[name](rank) for _ in range(2))
    state = torch.get_rng_state()
    with stepcheck.watch(loop.model, (X, Y), MSE) as report:
        loop.train()
    torch.set_rng_state(state)
    bare.train()
    pairs = zip(
        loop.model.state_dict().values(),
        bare.model.state_dict().values(),
        strict=True,
    )
    return report, all(torch.equal(a, b) for a, b in pairs)


def watched_by_one(rank):
    processes._FEW = 0.5  # seconds, for a record that does not come
    loop = Squares(rank)
    with (
        stepcheck.watch(loop.model, (X, Y), MSE)
        if not rank
        else contextlib.nullcontext() as report
    ):
        loop.train()
    return report


def ended(rank):
    loop = Squares(rank)
    with (
        contextlib.suppress(ValueError),
        stepcheck.watch(loop.model, (X, Y), MSE) as report,
    ):
        loop.train()
        if rank:
            raise ValueError
    return report


def told(report, **more):
    if report is None or report.elsewhere:
        return more | {
            "elsewhere": report and report.as_json()["elsewhere"],
            "found": report and len(report.findings),
            "required": report and report.require(),
        }
    return report.as_json() | {"is_right": report.is_right} | more


def run(rank, store, out):
    """Watch all loops in a process, and write what the reports have."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM
    )
    every = {}
    for name in LOOPS:
        report, is_same = same_bits(name, rank)
        every[name] = told(report, is_same=is_same)
    every["watched by one"] = told(watched_by_one(rank))
    every["ended"] = told(ended(rank))
    Path(f"{out}.{rank}").write_text(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            run, args=(f"{folder}/store", sys.argv[1]), nprocs=NUM
        )
