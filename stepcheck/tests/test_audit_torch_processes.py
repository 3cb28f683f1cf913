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
    "other weights": "Nothing can be said",
}
MORE = {  # what else the report has
    "tokens of one": "fix: divide by the tokens or weights of all processes: `dist.all_reduce(num)`",
    "added up": "fix: average the gradients: `p.grad /= dist.get_world_size()`",
    "divided again": "is multiplied by `dist.get_world_size()`",
    "called inside": "fix: call the `DistributedDataParallel` itself, not its `module`",
    "the same rows": "in PyTorch by a `DistributedSampler`",
    "the same order": "call `set_epoch(epoch)` in every epoch",
    "each its own model": "share no gradient: this is the report of process 0 alone",
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
    assert noted == {"each its own model", "right: sharded states"}
    assert {name for told in (one, two) for name in FIRST if not told[name]["is_same"]} == set()
    here = "This is process 1 of 2: process 0 judges the loop of all, and has the report."
    assert {told["text"] for name, told in two.items() if name != "one audit"} == {here}
    assert two["right"]["first_line"] == here
    assert two["right"]["causes"] == []
