"""Two processes that cut each batch by hand

kind: right
engine: torch
process: own
author: suite
says: Each takes four of the eight rows of a batch.
call: network, data=(x, y), loss=nn.MSELoss()
"""
import tempfile

import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    torch.manual_seed(0)
    x = torch.randn(48, 5)
    y = x @ torch.randn(5, 1) + 0.1 * torch.randn(48, 1)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    order = torch.Generator().manual_seed(1)
    # ---- training ----
    for epoch in range(3):
        for rows in torch.randperm(48, generator=order).split(8):
            own = (rows[:4], rows[4:])[rank]
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[own]), y[own])
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, loss.item())


def process(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        other = fork.Process(target=process, args=(1, f"{folder}/store"))
        other.start()
        process(0, f"{folder}/store")
        other.join()
