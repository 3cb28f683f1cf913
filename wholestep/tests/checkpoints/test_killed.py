"""A run that is killed at any time resumes with the same bits."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launching import begin, found, launch, only_jax
from runs import GROWING_LAST, LAST, steps_in
from scripts import HERE, TESTS, lean
from shares import later

KILLED = [(True, False), (False, True), (True, True)]  # of two processes
SCRIPT = [sys.executable, str(HERE / "killed_runs.py")]


class Nursery:
    """A process that has imported Keras, and whose forks train."""

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(SCRIPT, env=lean(HERE, TESTS), text=True, **pipes)
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def begin(self, **how):
        """Begin a run, and return the number of its process; its arguments: see `killed.train`."""
        self.process.stdin.write(json.dumps(how) + "\n")
        self.process.stdin.flush()
        return int(self.said("pid"))

    def said(self, *words):
        """Return the rest of the next line that begins with one of these words."""
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word in words:
                return rest
        raise AssertionError(self.process.stderr.read())


def bits(out):
    with np.load(out) as held:
        return [held[name].tobytes() for name in held.files]


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("data", "kills"),
    [
        ("arrays", 2),
        ("growing", 2),
        *later([("arrays", 250), ("workers", 250), ("growing", 50)]),
    ],
)
@pytest.mark.slow
def test_a_run_that_is_killed_at_any_time_goes_on(data, kills, tmp_path):
    rng = np.random.default_rng(kills)
    done = 0
    last = [GROWING_LAST if data == "growing" else LAST]
    with Nursery() as nursery:
        nursery.begin(data=data, out=str(whole := tmp_path / "whole.npz"))
        assert nursery.said("ended") == "0"
        for run in itertools.count():
            folder = tmp_path / str(run)
            out = tmp_path / f"{run}.npz"
            how = {"data": data, "out": str(out), "checkpoints": str(folder)}
            while done < kills and steps_in(folder)[-1:] != last:
                before = steps_in(folder)
                process = nursery.begin(**how, seconds=0.05)
                if rng.integers(8):  # or it is killed before it trains
                    nursery.said("update", "ended")
                time.sleep(rng.uniform(0, 0.4))
                while done == 0 and not steps_in(folder):  # one at least is used
                    time.sleep(0.01)
                kill(process)
                is_killed = (code := nursery.said("ended")) == "-9"
                after = steps_in(folder)
                # it had ended just before
                assert is_killed or (code == "0" and after[-1:] == last)
                assert not before or after[-1] >= before[-1]
                done += is_killed
            nursery.begin(**how)
            assert nursery.said("ended") == "0"
            assert bits(out) == bits(whole), f"other bits after {done} kills"
            assert not list(folder.glob("bad-*"))
            if done == kills:
                break


@pytest.mark.parametrize(
    ("call", "num"),
    later((call, num) for call in ("rename", "fsync", "write") for num in (1, 2, 3, 4, 9)),
)
def test_a_run_that_is_killed_in_the_middle_of_a_save_goes_on(call, num, tmp_path):
    with Nursery() as nursery:
        nursery.begin(model="made", out=str(whole := tmp_path / "whole.npz"))
        assert nursery.said("ended") == "0"
        how = {
            "model": "made",
            "out": str(out := tmp_path / "out.npz"),
            "checkpoints": str(folder := tmp_path / "run"),
        }
        nursery.begin(**how, kill_at=[call, num], every=2)
        assert nursery.said("ended") == "-9"
        nursery.begin(**how)
        assert nursery.said("ended") == "0"
        assert bits(out) == bits(whole)
        assert not list(folder.glob("bad-*"))
        assert not list(folder.glob(".*"))


@only_jax
@pytest.mark.large
@pytest.mark.parametrize("kills", [100])
def test_two_processes_of_which_one_or_both_are_killed_at_any_time_go_on(kills, tmp_path):
    rng = np.random.default_rng(kills)
    done = 0
    code, whole, _ = launch(2, "saving nothing 0", str(tmp_path / "whole"))
    assert code == 0, whole
    for run in itertools.count():
        folder = tmp_path / str(run)
        while done < kills and steps_in(folder)[-1:] != [24]:
            with begin(2, "saving nothing 0", str(folder)) as launched:
                begun = itertools.islice((line for line in launched.stdout if " pid " in line), 2)
                processes = [int(line.split()[2]) for line in begun]
                assert len(processes) == 2
                time.sleep(rng.uniform(0, 4))
                killed = [
                    process
                    for process, is_meant in zip(processes, KILLED[done % 3], strict=True)
                    if is_meant
                ]
                for process in killed:
                    kill(process)
                output, _ = launched.communicate(timeout=100)
            assert launched.returncode in (0, 137), output
            done += len(killed) if launched.returncode else 0
        code, output, _ = launch(2, "saving nothing 0", str(folder))
        assert code == 0, output
        assert [found(output, process) for process in range(2)] == [
            found(whole, process) for process in range(2)
        ]
        assert not list(folder.glob("bad-*"))
        if done >= kills:
            break
