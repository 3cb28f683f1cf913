"""`wholestep checkpoint` says what is there and whether it is good, without Keras."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from wholestep import cli
from wholestep.checkpoints.folder import Folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    kept = Folder(tmp_path / "run")
    watched = {"watched": {"name": "val_loss", "number": 0.25, "mode": "min"}}
    for step in (5, 10):
        kept.write(
            step, {"params/0": np.ones((2, 3), "float32")}, {"place": {"epoch": step}}, watched
        )
    return kept


def run(capsys, *arguments):
    """Return the exit code and the output."""
    code = cli.main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_what_is_there_is_listed(folder, capsys):
    code, out, _ = run(capsys, "ls", folder.folder)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step-00000010", "step-00000005"]
    assert "val_loss 0.25" in out
    code, out, _ = run(capsys, "ls", folder.path(5), "--json")
    (one,) = json.loads(out)
    assert (code, one["step"], one["arrays"], one["watched"]["number"]) == (0, 5, 1, 0.25)


def test_one_is_shown(folder, capsys):
    code, out, _ = run(capsys, "show", folder.folder, "--json")
    told = json.loads(out)
    assert (code, told["step"], told["facts"]["place"]["epoch"]) == (0, 10, 10)
    assert told["arrays"] == {"params/0": {"shape": [2, 3], "dtype": "F32"}}
    code, out, _ = run(capsys, "show", folder.path(5))
    assert code == 0
    assert "  epoch: 5" in out.splitlines()
    assert "  params/0  F32 [2, 3]" in out.splitlines()


def test_what_is_bad_is_told_and_is_the_exit_code(folder, capsys):
    (file,) = folder.path(5).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run(capsys, "ls", folder.folder)[0] == 0  # which reads manifests alone
    code, out, _ = run(capsys, "verify", folder.folder)
    assert code == 1
    assert "step-00000005  BAD: 00000-of-00001-00.safetensors must have the digest" in out
    code, out, _ = run(capsys, "verify", folder.path(10))
    assert code == 0
    assert out.startswith("step-00000010  good  ")
    assert json.loads(run(capsys, "verify", folder.path(10), "--json")[1])[0]["good"] is True
    assert "good" not in run(capsys, "ls", folder.path(10))[1]  # which has not read it
    folder.set_aside(5, "of a flipped bit")
    for command in ("ls", "verify"):
        code, out, _ = run(capsys, command, folder.folder, "--json")
        assert code == 1
        assert json.loads(out)[-1] == {"name": "bad-00000005-1", "bad": "of a flipped bit"}
    (folder.path(10) / "manifest.json").write_bytes(b"{}")
    assert run(capsys, "ls", folder.folder)[0] == 1
    code, _, err = run(capsys, "show", folder.folder)
    assert code == 1
    assert "manifest.json must have the digest" in err


def test_a_path_without_checkpoints_is_bad(tmp_path, capsys):
    for command in ("ls", "verify", "show"):
        code, _, err = run(capsys, command, tmp_path / "nothing")
        assert code == 1
        assert "The path must hold a checkpoint. Received: no folder " in err


def test_that_none_was_written_yet_is_told(tmp_path, capsys):
    Folder(tmp_path).lock().release()
    for command in ("ls", "verify", "show"):
        code, _, err = run(capsys, command, tmp_path)
        assert code == 1
        assert (
            f"Received: {tmp_path}, in which none was written yet. Try: again after the first"
            in err
        )


STRANGE = "\x1b[2J\r\nstep-00000099  good\u202e\x00\ud800"
AS_TEXT = r"\x1b[2J\r\nstep-00000099  good\u202e\x00\ud800"


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_strings_of_a_manifest_are_shown_as_one_line_of_plain_text(command, folder, capsys):
    watched = {"name": STRANGE, "number": 10**400, "mode": "min"}
    rest = {"time": STRANGE, STRANGE: {STRANGE: STRANGE}, "watched": watched}
    folder.write(20, {STRANGE: np.ones(3)}, {STRANGE: STRANGE}, rest)
    folder.write(30, {"a": np.ones(3)}, {}, {"watched": watched | {"number": 0.5}})
    for step in (20, 30):
        code, out, err = run(capsys, command, folder.path(step))
        assert (code, err, "step-00000099" in out) == (0, "", True)
        assert AS_TEXT in out or command == "show"  # which shows values as JSON
        assert all(
            line.isprintable() and not line.startswith("step-00000099") for line in out.splitlines()
        )
        code, out, err = run(capsys, command, folder.path(step), "--json")
        assert (code, err, out.isascii(), json.loads(out)) == (0, "", True, json.loads(out))
    folder.set_aside(30, STRANGE)
    code, out, _ = run(capsys, "ls", folder.folder)
    assert (code, out.splitlines()[-1]) == (1, f"bad-00000030-1  BAD: {AS_TEXT}")


def test_a_terminal_that_lacks_a_letter_is_no_error(folder):
    folder.write(20, {"a": np.ones(3)}, {}, {"time": "é"})
    asked = [sys.executable, "-m", "wholestep", "checkpoint", "ls", str(folder.path(20))]
    done = subprocess.run(
        asked, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr, rb"\xe9" in done.stdout) == (0, b"", True)


def test_errors_that_quote_a_checkpoint_are_one_line_of_plain_text(folder, capsys):
    path = folder.path(10) / "manifest.json"
    said = json.loads(path.read_bytes().splitlines()[0])
    line = json.dumps(
        said | {"leaves": [said["leaves"][0] | {"name": STRANGE, "dtype": "O"}]}
    ).encode()
    path.write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")
    code, out, _ = run(capsys, "ls", folder.path(10))
    assert (code, len(out.splitlines()), AS_TEXT in out) == (1, 1, True)
    code, _, err = run(capsys, "show", folder.path(10))
    assert (code, len(err.splitlines()), AS_TEXT in err) == (1, 1, True)


def test_the_help_says_the_names_of_the_commands(capsys):
    for arguments in (["--help"], ["checkpoint", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert "ls, verify, show, copy or prune" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_folder_is_told(capsys):
    for command in ("ls", "verify", "show"):
        code, out, err = run(capsys, command, "elsewhere://bucket/run")
        assert (code, out) == (1, "")
        assert (
            "elsewhere://bucket/run needs fsspec, and its package for this kind of address." in err
        )


def test_a_folder_that_cannot_be_read_is_told(folder, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    code, _, err = run(capsys, "ls", folder.folder)
    assert code == 1
    assert "Permission denied" in err


def test_whoever_reads_may_stop_reading(folder):
    for command in ("ls", "verify", "show"):
        reads, writes = os.pipe()
        os.close(reads)
        source = "import sys\nfrom wholestep import cli\nsys.exit(cli.main(sys.argv[1:]))"
        asked = [sys.executable, "-c", source, "checkpoint", command, str(folder.folder)]
        done = subprocess.run(asked, stdout=writes, stderr=subprocess.PIPE)
        os.close(writes)
        assert (done.returncode, done.stderr) == (0, b"")


def test_keras_is_not_imported(folder):
    source = (
        "import sys\nfrom wholestep import cli\ncode = cli.main(['checkpoint', 'verify', "
        "sys.argv[1]])\n"
    )
    source += (
        "assert not {'keras', 'jax', 'tensorflow'} & set(sys.modules), 'imported'\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(folder.folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step-00000010" in done.stdout
