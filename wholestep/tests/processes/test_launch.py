"""Several processes: the update of one, separate rows, and an end of all when one is lost."""

import io
import itertools
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import keras
import numpy as np
import pytest
from launching import BOUND, found, launch, only_jax
from scripts import HERE, lean
from shares import later, on

import wholestep as ws
from wholestep import cli
from wholestep.checkpoints.folder import Folder
from wholestep.processes import launch as launcher
from wholestep.processes.watchdog import PATIENCE


@pytest.fixture(scope="module")
def ended_well(tmp_path_factory):
    """Return a function of the output and the files of a run of `num` processes."""

    @cache
    def run(num):
        folder = tmp_path_factory.mktemp("processes")
        code, output, _ = launch(num, "cases, write, brisk", str(folder))
        assert code == 0, output
        return output, folder

    return run


@only_jax
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.large)])
@pytest.mark.slow
def test_no_bit_differs_between_processes(num, ended_well):
    import launched

    output, _ = ended_well(num)
    alone = launched.all_cases(many=num == 4)
    losses = launched.losses_in_buckets()
    runs = launched.whole_runs() if num == 4 else []
    loaded = []
    for process in range(num):
        own = found(output, process)
        assert own["cases"] == alone
        assert own["buckets"] == losses
        np.testing.assert_allclose(own["runs"], runs, rtol=2e-6, atol=2e-6)
        loaded.append(own["loaded"])
    assert loaded == [64 // num] * num


@only_jax
@pytest.mark.slow
def test_parameters_that_no_process_holds_whole():
    import launched

    alone = launched.sharded()
    keras.distribution.set_distribution(None)
    code, output, _ = launch(2, "sharded", devices=2)
    assert code == 0, output
    for process in range(2):
        own = found(output, process)
        assert (
            "Sharded, never gathered for the update: sequential/dense/kernel (None, 'columns')"
            in own["explain"]
        )
        assert (
            "sharded over devices in a run of several processes. Received: sequential/dense/kernel"
            in own["saving"]
        )
        assert "checkpoints= in place of ModelCheckpoint and EarlyStopping" in own["saving"]
        assert "OrbaxCheckpoint works only in a run of one process" in own["saving"]
        assert own["values"] == alone["values"]


FAULTS = {
    "killed 1": "process 1 was ended by SIGKILL",
    "killed 0": "process 0 was ended by SIGKILL",
    "stopped 1": r"Process 1 has given no sign of life for \d+ s",
    "error 1": "Process 1 failed while at work after update 3 .*: OSError: the disk is gone",
    "error 0": "Process 0 failed while at work after update 3 .*: OSError: the disk is gone",
    "busy 1": r"Process 1 has been at work after update 3 \(reading data, or in a callback\) for "
    r"[0-9]+ s",
    "exit 1": "Process 1 failed while .* exit code 3",
    "terminated 1": r"Process 1 is asked to end \(SIGTERM\), and does so after a whole number .* "
    r"after "
    r"update 3 ",
    "nan": "not finite in rows 17",
    "other data": r"process 1: data\[0\] is ",
    "other code": "process 1: the model is ",
    "other values": r"process 1: sequential/dense/kernel \(5x1 float32\) is ",
    "other calls": "wait for each other: process 0 is comparing configurations, process 1 is "
    "comparing",
    "uneven": r"process 1 is comparing positions \(stands at batch 0 of epoch 1\)",
}
QUICK = ("killed 1", "error 0")


@only_jax
@pytest.mark.parametrize(
    "what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.large) for w in FAULTS]
)
@pytest.mark.slow
def test_a_run_that_cannot_go_on_ends_and_says_why(what):
    code, output, seconds = launch(2, what)
    assert code == {"killed": 137, "terminated": 143}.get(what.split()[0], 1)
    assert re.search(FAULTS[what], output), output
    assert "not a word of trouble" not in output
    assert seconds < BOUND


LOST = {  # how one process is lost, and how it is named
    "exit": r"Process {} ended its script \d+ s ago, while others wait for it",
    "exit 3": r"Process {} failed while .* exit code 3",
    "error": r"Process {} failed while .*FileNotFoundError",
    "left": r"Process {} has given no sign of life for \d+ s|process {} had ended before",
    "killed": r"process {} was ended by SIGKILL",
    "sleeps": r"Process {} has been at work after update \d+ \(reading data, or in a callback\) "
    r"for",
    "stops": r"wait for each other: .*process {} is comparing|Process {} ended its script",
}


@only_jax
@pytest.mark.large
@pytest.mark.parametrize("place", ["callback", "loop"])
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("kind", LOST)
def test_a_run_that_loses_a_process_ends_within_half_a_minute_and_names_it(kind, process, place):
    code, output, _ = launch(2, f"lose {kind}/{process}/{place}", patience=PATIENCE)
    seconds = time.time() - float(re.search(r"FAULT (\S+)", output)[1])
    print(f"{kind}, process {process}, {place}: ended {seconds:.1f} s after")
    assert code not in (0, None)
    assert re.search(LOST[kind].replace("{}", str(process)), output), output
    assert f"[{1 - process}] not a word of trouble" not in output
    assert seconds < 30


@only_jax
def test_files_come_from_the_first_process(ended_well):
    output, folder = ended_well(2)
    for kind in ("plain", "distribution"):
        assert sorted(path.name for path in (folder / kind / "0").iterdir()) == [
            "log.csv",
            "m.keras",
        ]
        assert list((folder / kind / "1").iterdir()) == []
        saved = keras.saving.load_model(folder / kind / "0" / "m.keras")
        assert int(saved.optimizer.iterations) == 1
    for said in ("1/1 - ", "Epoch 1: LearningRateScheduler"):
        assert output.count(f"[0] {said}") == 2
        assert f"[1] {said}" not in output


@only_jax
def test_no_thread_is_inside_the_store_when_a_process_ends(ended_well):
    ended_well(2)  # the interpreter would abort, nearly every time


@only_jax
@pytest.mark.parametrize("sent", [signal.SIGTERM, *later([signal.SIGINT])])
@pytest.mark.slow
def test_an_interrupt_ends_all(sent):
    environment = lean(HERE)
    command = [
        sys.executable,
        "-m",
        "wholestep.cli",
        "launch",
        "-n",
        "2",
        str(HERE / "launched.py"),
        "busy 9",
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    begun = list(itertools.islice((line for line in process.stdout if " pid " in line), 2))
    assert len(begun) == 2  # all are at work
    process.send_signal(sent)
    output, _ = process.communicate(timeout=BOUND)
    assert process.returncode == 128 + sent, output
    assert f"interrupted ({sent.name}); all processes end" in output


JOINING = """
import os, signal, time
import jax
from wholestep.processes import group
connects = jax.distributed.initialize
def terminated(**how):
    connects(**how)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
jax.distributed.initialize = terminated
group.join()
"""


@only_jax
@pytest.mark.large
def test_a_process_that_is_terminated_while_it_joins_ends():
    own = {
        "COORDINATOR_ADDRESS": f"127.0.0.1:{launcher._free_port()}",
        "NUM_PROCESSES": "1",
        "PROCESS_ID": "0",
    }
    environment = lean(**{f"WHOLESTEP_{name}": value for name, value in own.items()})
    done = subprocess.run(
        [sys.executable, "-c", JOINING], env=environment, timeout=BOUND, capture_output=True
    )
    assert done.returncode == -signal.SIGTERM


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@only_jax
@pytest.mark.slow
def test_processes_end_with_their_launcher_however_it_ends():
    environment = lean(HERE, WHOLESTEP_PATIENCE="600")
    command = [
        sys.executable,
        "-m",
        "wholestep.cli",
        "launch",
        "-n",
        "2",
        str(HERE / "launched.py"),
        "busy 0",
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [
        int(line.split()[2])
        for line in itertools.islice(filter(lambda line: " pid " in line, process.stdout), 2)
    ]
    assert all(map(is_alive, pids))
    process.kill()
    process.communicate()
    until = time.monotonic() + BOUND / 2
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))


@only_jax
def test_a_patience_that_is_no_number(monkeypatch):
    from wholestep.processes import group

    monkeypatch.setenv("WHOLESTEP_PATIENCE", "a while")
    with pytest.raises(
        ws.SpecificationError, match=r"must be a number of seconds\. Received: a while"
    ):
        group.join()


@on("jax")
@pytest.mark.slow
def test_the_command_line_starts_without_keras():
    look = (
        "import sys, wholestep as ws, wholestep.cli; print('keras' in sys.modules, "
        "{*ws.__all__} <= {*dir(ws)})"
    )
    look += "; print(all(hasattr(ws, name) for name in ws.__all__), 'keras' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", look], env=lean(), capture_output=True, text=True
    ).stdout
    assert found == "False True\nTrue True\n"
    with pytest.raises(AttributeError, match="no attribute 'Batch'"):
        ws.Batch  # noqa: B018


def test_launch_says_what_it_needs(capsys, monkeypatch):
    assert cli.main(["launch", "-n", "2", "nothing.py"]) == 2
    assert "The script must be a file. Received: nothing.py" in capsys.readouterr().err
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    assert cli.main(["launch", __file__]) == 2
    assert "Several processes need the JAX engine" in capsys.readouterr().err


@only_jax
def test_who_is_to_blame():
    from wholestep.processes.watchdog import START, Beat, judge, silence

    def beat(
        doing="computing update 7", waits="computing update 7", seconds=1.0, step=0.1, silence=0.0
    ):
        return Beat(1, doing, waits, seconds, step), silence

    late = PATIENCE + 1
    assert judge({0: beat(), 1: beat(seconds=late)}) is None
    assert judge({0: beat(seconds=late), 1: beat(seconds=late)}) is None  # a long step of all
    assert "Process 1 has given no sign" in judge(
        {0: beat(), 1: beat(silence=silence(PATIENCE) + 1)}
    )
    loading = {"doing": "starting", "waits": ""}
    assert judge({0: beat(), 1: beat(**loading, silence=silence(PATIENCE) + 1)}) is None
    assert "Process 1 has given no sign" in judge(
        {0: beat(), 1: beat(**loading, silence=4 * silence(PATIENCE) + 1)}
    )
    busy = {"doing": "reading data", "waits": ""}
    assert judge({0: beat(seconds=late), 1: beat(**busy, seconds=2.0)}) is None
    assert judge({0: beat(seconds=2.0), 1: beat(**busy, seconds=late)}) is None
    assert "Process 1 has been reading data" in judge(
        {0: beat(seconds=late), 1: beat(**busy, seconds=late)}
    )
    slow = {"seconds": late, "step": late}
    assert judge({0: beat(**slow), 1: beat(**busy, **slow)}) is None
    new = {"doing": "starting", "waits": ""}
    assert judge({0: beat(seconds=late), 1: beat(**new, seconds=late)}) is None
    assert "Process 1 has been starting" in judge(
        {0: beat(seconds=START + 1), 1: beat(**new, seconds=START + 1)}
    )
    apart = judge({0: beat(seconds=late), 1: beat("comparing", "the store, call 3", seconds=late)})
    assert "wait for each other: process 0 is computing update 7, process 1 is comparing" in apart
    calls = (beat("comparing", f"the store, call {i}", seconds=late) for i in (3, 4))
    assert "wait for each other" in judge(dict(enumerate(calls)))
    left = {0: beat(seconds=late), 1: beat("ending", "", seconds=late)}
    assert judge(left) == f"Process 1 ended its script {late:.0f} s ago, while others wait for it."
    # its script is through
    assert judge({0: beat(), 1: beat("ending", "", silence=silence(PATIENCE) + 1)}) is None


def test_the_output_of_a_process_is_copied_by_lines_and_closed():
    output = io.StringIO("one\ntwo")
    to = io.StringIO()
    launcher._copy(3, output, to, threading.Lock())
    assert to.getvalue() == "[3] one\n[3] two\n"
    assert output.closed


# ---- checkpoints ----


@only_jax
@pytest.mark.parametrize("layout", ["sharded", *later(["replicas"])])
@pytest.mark.slow
def test_a_run_of_several_processes_goes_on_with_the_same_bits(layout, tmp_path):
    code, output, _ = launch(2, f"resumed {layout}", str(tmp_path), devices=2)
    assert code == 0, output
    for process in range(2):
        whole, *others = found(output, process)
        assert others == [whole] * 2
    assert output.count("resumes from") == 1
    assert output.count("is complete (epoch ") == 1
    assert "[1] wholestep: " not in output
    folder = Folder(tmp_path)
    for step in folder.steps():
        manifest = folder.verify(step)
        assert {file.name[:5] for file in manifest.files} == {"00000", "00001"}
        assert any(leaf.begin is not None for leaf in manifest.leaves) == (layout == "sharded")
    assert len(folder.steps()) in (2, 3)  # the best one may be one of the two newest
    assert sorted(path.name for path in folder.folder.iterdir() if "step-" not in path.name) == [
        "lock"
    ]


@only_jax
@pytest.mark.parametrize(
    "what",
    later(f"saving {how}" for how in ("terminated 1", "killed 1", "killed 0")),
)
def test_processes_that_were_ended_go_on_together_or_one_goes_on_alone(what, tmp_path):
    import launched

    whole = launched.trained()
    folder = tmp_path / "run"
    code, output, _ = launch(2, what, str(folder))
    assert code == {"killed": 137, "terminated": 143}[what.split()[1]], output
    steps = Folder(folder).steps()
    assert steps[-1] == 4
    # the second save may have begun
    assert (8 < steps[0] < 24) if "terminated" in what else steps[0] in (4, 8)
    assert "Traceback" not in output
    shutil.copytree(folder, copy := tmp_path / "copy")
    code, output, _ = launch(2, "go on", str(folder))
    assert code == 0, output
    assert found(output, 0) == found(output, 1)
    history = found(output, 0)["history"]
    alone = launched.ended(copy, seed=2)
    for name, values in whole["history"].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(alone["history"][name], values, rtol=1e-5, atol=1e-6)


@only_jax
@pytest.mark.large
def test_a_launcher_that_is_terminated_lets_its_processes_save(tmp_path):
    environment = lean(HERE, WHOLESTEP_PATIENCE="9")
    script = [str(HERE / "launched.py"), "saving nothing 0", str(tmp_path)]
    command = [sys.executable, "-m", "wholestep.cli", "launch", "-n", "2", *script]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until = time.monotonic() + BOUND
    while not Folder(tmp_path).steps() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=BOUND)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    # it was saved when it was ended, and not as every fourth update is
    assert Folder(tmp_path).steps()[0] % 4
    Folder(tmp_path).lock().release()


@only_jax
@pytest.mark.large
def test_four_processes_go_on_with_what_two_have_saved(tmp_path):
    import launched

    code, output, _ = launch(2, "saving terminated 0", str(tmp_path))
    assert code == 143, output
    code, output, _ = launch(4, "go on", str(tmp_path))
    assert code == 0, output
    assert "processes 4 (2 before)" in output
    several = [found(output, process) for process in range(4)]
    assert several[1:] == several[:1] * 3

    for name, values in launched.trained()["history"].items():
        np.testing.assert_allclose(several[0]["history"][name], values, rtol=1e-5, atol=1e-6)


@only_jax
@pytest.mark.large
def test_a_run_goes_on_in_another_mesh_of_several_processes(tmp_path):
    import launched

    code, output, _ = launch(2, "saving terminated 1 2", str(tmp_path / "run"), devices=2)
    assert code == 143, output
    whole = launched.trained()
    for columns in (0, 1, 4):
        shutil.copytree(tmp_path / "run", copy := tmp_path / str(columns))
        code, output, _ = launch(2, f"go on {columns}", str(copy), devices=2)
        assert code == 0, output
        assert "resumes from" in output
        history = found(output, 1)["history"]
        for name, values in whole["history"].items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)
