"""The audit of loops in several processes of PyTorch: each keeps its record, and process 0 judges."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
pytest.importorskip("torch")

HOME = Path(__file__).parent
RIGHT = "Nothing found in "
DRIFT = "Replicas drift apart. Each process steps by its own gradient"
OWN_TOKENS = "Mean of means. Each replica divides by its own weights, and the means are averaged"
FIRST = {
    "right": RIGHT,
    "right: its own loss": RIGHT,
    "right: averaged by hand": RIGHT,
    "right: batch norm and dropout": RIGHT,
    "right: tokens": RIGHT,
    "right: tokens, accumulated": RIGHT,
    "right: sharded states": RIGHT,
    "each its own model": RIGHT,
    "the same masks": RIGHT,
    "uneven": "Mean of means. Each replica divides by its own rows",
    "tokens of one": OWN_TOKENS,
    "tokens of one, accumulated": OWN_TOKENS,
    "tokens of a microbatch": "Mean of means. Each row's gradient counts 1 / (the number of microbatches x",
    "never shared": DRIFT,
    "called inside": DRIFT,
    "added up": "Summed over replicas. Each replica divides by its own rows, and the gradients are added up",
    "divided again": "Divided by the replicas twice. Each row's gradient counts what it should / the number of",
    "the same rows": "Each of the 2 replicas gets the same rows",
    "the same order": "Same order every pass",
    "other weights": "The processes share their gradients, and begin with different weights",
}
MORE = {  # what else the report has
    "tokens of one": "fix: divide by the tokens or weights of all processes: `dist.all_reduce(num)`",
    "added up": "fix: average the gradients: `p.grad /= dist.get_world_size()`",
    "divided again": "is multiplied by `dist.get_world_size()`",
    "called inside": "fix: call the `DistributedDataParallel` itself, not its `module`",
    "the same rows": "in PyTorch by a `DistributedSampler`",
    "the same order": "call `set_epoch(epoch)` in every epoch",
    "each its own model": "share no gradient: this is the report of process 0 alone",
    "the same masks": "draw from the same random state, so that their rows have the same dropout masks",
    "other weights": "dist.broadcast(p.data, 0)",
    "one audit": "the record of process 1 is missing (each process runs its loop under its own audit",
    "ended": "the record of process 1 is missing (its loop has ended with an error)",
}


def test_process_0_judges_the_loop_of_all_which_trains_the_same_bits_as_without_an_audit(tmp_path):
    subprocess.run([sys.executable, "torch_processes.py", tmp_path / "told"], cwd=HOME, check=True, timeout=200)
    one, two = (json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2))
    first = {name: told["first_line"] for name, told in one.items() if "first_line" in told}
    assert first.keys() == FIRST.keys()
    assert {n: line for n, line in first.items() if not line.startswith(FIRST[n])} == {}
    assert {name for name, more in MORE.items() if more not in one[name]["text"]} == set()
    noted = {name for name, told in one.items() if FIRST.get(name) == RIGHT and told["notes"]}
    assert noted == {"each its own model", "the same masks", "right: sharded states"}
    assert {name for told in (one, two) for name in FIRST if not told[name]["is_same"]} == set()
    here = "This is process 1 of 2: process 0 judges the loop of all, and has the report."
    assert {told["text"] for name, told in two.items() if name != "one audit"} == {here}
    assert two["right"]["first_line"] == here
    assert two["right"]["causes"] == []


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randint(1, 11, (48, 6))
y = (x * 3) % 11
y[torch.arange(6) >= torch.randint(1, 7, (48, 1))] = -100
model = DistributedDataParallel(nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
sampler = DistributedSampler(TensorDataset(x, y))
loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for tokens, tags in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).transpose(1, 2), tags).backward()
        optimizer.step()
dist.destroy_process_group()
"""


def test_the_command_judges_a_script_that_torchrun_starts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "stepcheck", "run", "--json", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    told = json.loads(ran.stdout)
    assert told["first_line"].startswith(OWN_TOKENS)
    assert told["causes"][0]["line"]["text"].startswith("nn.functional.cross_entropy(model(tokens)")
    assert ran.stderr.count("process 0 judges the loop of all") == 1
    assert ran.returncode == 1


SPAWNING = """
import torch.multiprocessing as mp

def train(rank):
    pass

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
"""


def test_processes_that_a_script_starts_itself_are_said(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "stepcheck", "run", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 2
    assert "the processes that `torch.multiprocessing.spawn` starts" in ran.stdout
    assert "torchrun --nproc-per-node N -m stepcheck run" in ran.stdout
