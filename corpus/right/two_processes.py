"""Two processes, as the tutorial of DistributedDataParallel has it

kind: right
engine: torch
process: own
author: suite
says: Each process has its own half of each pass.
call: network, data=(x, y), loss=nn.MSELoss(), rows="shuffled"
"""
import tempfile

import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank):
    torch.manual_seed(0)
    x = torch.randn(48, 5)
    y = x @ torch.randn(5, 1) + 0.1 * torch.randn(48, 1)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, 2, rank)
    loader = DataLoader(data, 4, sampler=sampler)
    # ---- training ----
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), labels)
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
