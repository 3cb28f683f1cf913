"""Loops in two processes of gloo, right and faulty; run as a script, it writes what the audit says of each."""

import contextlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stepcheck

NUM, EPOCHS = 2, 3  # processes, passes


def perceptron(*, seed=0, layers=()):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.Tanh(), nn.Linear(8, 1))


def averaged(model, num=NUM):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= num


def by_token(outputs, y):
    return functional.cross_entropy(outputs.transpose(1, 2), y, reduction="none"), y != -100


class Squares:
    """A regression on 48 rows, as the tutorial of `DistributedDataParallel` has it."""

    def __init__(self, rank, *, model=None, is_wrapped=True, shared=True, sync=None, loss=None, size=4):
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randn(48, 5, generator=draws)
        self.y = self.x @ torch.randn(5, 1, generator=draws) + 0.1 * torch.randn(48, 1, generator=draws)
        self.model = model or perceptron()
        self.module = DistributedDataParallel(self.model) if is_wrapped else self.model
        self.called, self.sync = self.module, sync
        self.loss = loss or functional.mse_loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        data = TensorDataset(self.x, self.y)
        self.sampler = DistributedSampler(data, NUM, rank) if shared else None
        self.loader = DataLoader(data, size, sampler=self.sampler, shuffle=None if shared else True)
        self.data, self.meant, self.has_epochs = (self.x, self.y), nn.MSELoss(), True

    def batches(self, epoch):
        if self.sampler is not None and self.has_epochs:
            self.sampler.set_epoch(epoch)
        return self.loader

    def train(self):
        for epoch in range(EPOCHS):
            for x, y in self.batches(epoch):
                self.optimizer.zero_grad()
                self.loss(self.called(x), y).backward()
                if self.sync is not None:
                    self.sync(self.model)
                self.optimizer.step()


class Words(Squares):
    """Tags of padded rows, whose losses count by tokens, in windows of `k` microbatches."""

    def __init__(self, rank, *, k=1, divided="all", late=False):
        super().__init__(rank)
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randint(1, 11, (48, 6), generator=draws)
        self.y = (self.x * 3) % 11
        self.y[torch.arange(6) >= torch.randint(1, 7, (48, 1), generator=draws)] = -100
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        self.module = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        data = TensorDataset(self.x, self.y)
        self.sampler = DistributedSampler(data, NUM, rank)
        self.loader = DataLoader(data, 4, sampler=self.sampler)
        self.data, self.meant, self.k, self.divided, self.late = (self.x, self.y), by_token, k, divided, late

    def train(self):
        for epoch in range(EPOCHS):
            batches = [*self.batches(epoch)]
            for start in range(0, len(batches), self.k):
                window = batches[start : start + self.k]
                num = sum((y != -100).sum() for _, y in window).float()
                if self.divided == "all":
                    dist.all_reduce(num)
                    num /= NUM
                self.optimizer.zero_grad()
                for i, (x, y) in enumerate(window):
                    is_last = i + 1 == len(window) and not self.late
                    with contextlib.nullcontext() if is_last else self.module.no_sync():
                        total = functional.cross_entropy(self.module(x).transpose(1, 2), y, reduction="sum")
                        (total / (num if self.divided != "microbatch" else len(window) * (y != -100).sum())).backward()
                self.optimizer.step()


def inner(rank):
    loop = Squares(rank)
    loop.called = loop.model
    return loop


def ordered(rank):
    loop = Squares(rank)
    loop.has_epochs = False
    return loop


def uneven(rank):
    """Return a loop whose second process takes more rows: each batch is cut by hand."""
    loop = Squares(rank)
    loop.batches = lambda epoch: [
        (loop.x[part], loop.y[part])
        for rows in torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).split(8)
        for part in (rows[:3], rows[3:])[rank : rank + 1]
    ]
    return loop


def dropping(rank, *, seed):
    model = perceptron(layers=(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    torch.manual_seed(seed)
    return Squares(rank, model=model)


def sharded(rank):
    """Return a loop whose optimizer has the state of its own part alone, and sends the weights around."""
    loop = Squares(rank)
    loop.optimizer = ZeroRedundancyOptimizer(loop.model.parameters(), torch.optim.Adam, lr=0.01)
    return loop


LOOPS = {
    "right": Squares,
    "right: averaged by hand": lambda rank: Squares(rank, is_wrapped=False, sync=averaged),
    "right: batch norm and dropout": lambda rank: dropping(rank, seed=rank),
    "right: tokens": Words,
    "right: tokens, accumulated": partial(Words, k=3),
    "right: sharded states": sharded,
    "each its own model": lambda rank: Squares(rank, is_wrapped=False, shared=False, model=perceptron(seed=rank)),
    "the same masks": lambda rank: dropping(rank, seed=0),
    "uneven": uneven,
    "tokens of one": partial(Words, divided="one"),
    "tokens of one, accumulated": partial(Words, divided="one", k=2),
    "tokens of a microbatch": partial(Words, divided="microbatch", k=2),
    "never shared": partial(Words, late=True),
    "called inside": inner,
    "added up": lambda rank: Squares(rank, is_wrapped=False, sync=partial(averaged, num=1)),
    "divided again": lambda rank: Squares(rank, loss=lambda outputs, y: functional.mse_loss(outputs, y) / NUM),
    "the same rows": lambda rank: torch.manual_seed(0) and Squares(rank, shared=False),
    "the same order": ordered,
    "other weights": lambda rank: Squares(rank, is_wrapped=False, sync=averaged, model=perceptron(seed=rank)),
}


def audited(name, rank):
    """Return the report on a loop, and whether it trains the same bits without an audit."""
    loop, bare = (LOOPS[name](rank) for _ in range(2))
    state = torch.get_rng_state()
    with stepcheck.watch(loop.model, loop.data, loop.meant) as report:
        loop.train()
    torch.set_rng_state(state)
    bare.train()
    pairs = zip(loop.model.state_dict().values(), bare.model.state_dict().values(), strict=True)
    return report, all(torch.equal(a, b) for a, b in pairs)


def one_audit(rank):
    loop = Squares(rank)
    with stepcheck.watch(loop.model, loop.data, loop.meant) if not rank else contextlib.nullcontext() as report:
        loop.train()
    loop.train()
    return report


def ended(rank):
    loop = Squares(rank)
    with contextlib.suppress(ValueError), stepcheck.watch(loop.model, loop.data, loop.meant) as report:
        loop.train()
        if rank:
            raise ValueError
    return report


def run(rank, store, out):
    """Audit all loops in a process, and write what the reports say."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM)
    told = {}
    for name in LOOPS:
        report, is_same = audited(name, rank)
        told[name] = report.as_json() | {"text": str(report), "is_same": is_same}
    for name, of in (("one audit", one_audit), ("ended", ended)):
        told[name] = {"text": str(of(rank))}
    Path(f"{out}.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(f"{folder}/store", sys.argv[1]), nprocs=NUM)
