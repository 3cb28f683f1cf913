"""Two processes, and a mean over the tokens of both

kind: right
engine: torch
process: own
author: suite
says: The number of tokens is that of both processes; the wrapper averages the gradients.
meant: def by_token(out, y):
        return F.cross_entropy(out.transpose(1, 2), y, reduction="none"), y != -100
call: network, data=(x, y), loss=by_token
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
    x = torch.randint(1, 11, (48, 6))
    y = (x * 3) % 11
    y[torch.arange(6) >= torch.randint(1, 7, (48, 1))] = -100
    network = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, 2, rank)
    loader = DataLoader(data, 4, sampler=sampler)
    # ---- training ----
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            num = (labels != -100).sum().float()
            dist.all_reduce(num)
            optimizer.zero_grad()
            total = F.cross_entropy(model(inputs).transpose(1, 2), labels, reduction="sum")
            loss = 2 * total / num
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
