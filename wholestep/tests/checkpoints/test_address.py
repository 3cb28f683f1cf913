"""The password of an address is in no text, and a store that does not answer is an error after some
seconds.
"""

import copy
import dataclasses
import pickle
import socket
import traceback
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from runs import BATCHES, HOW, Tells, X, Y, small
from stores import Memory, TwoProcesses, filled, fsspec, pushed, store

import wholestep as ws
from wholestep import cli
from wholestep.checkpoints.address import Address
from wholestep.checkpoints.folder import Folder
from wholestep.checkpoints.resume import read_one
from wholestep.checkpoints.shared_folder import SharedFolder

TOKEN = "0123456789abcdef"


# ---- the address ----


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("ftp://host:21/runs@home", "ftp://host:21/runs@home"),
        ("file:///a:b/c@d", "file:///a:b/c@d"),
        ("ftp://me:pass@host:21/a@b", "ftp://host:21/a@b"),
        ("ftp://:pass@host/a", "ftp://host/a"),
        ("ftp://me:p@ss@host/a", "ftp://host/a"),
        ("ftp://me:pa/ss@host/a", "ftp://host/a"),
        ("ftp://me:p%40ss@host/a", "ftp://host/a"),
        ("smb://group;me:pass@host/a", "smb://host/a"),
        ("zip://a.zip::ftp://me:pa/ss@host/b", "zip://a.zip::ftp://host/b"),
        (
            "simplecache::ftp://me:pass@host/a::s3://key:word@b/c",
            "simplecache::ftp://host/a::s3://b/c",
        ),
        ("abfs://c@a/b?sig=12+/=&se=2030", "abfs://c@a/b?sig=***&se=***"),
    ],
)
def test_an_address_is_a_text_without_credentials(url, text):
    address = Address(url)
    assert [str(address), f"{address}", repr(address)] == [text, text, repr(text)]
    assert address.raw == url
    step = address / "step-00000001"
    assert (step, step.raw) == (f"{text}/step-00000001", f"{url}/step-00000001")
    assert (step.name, step.parent, step.parent.raw) == ("step-00000001", text, url)
    for same in (Address(address), copy.deepcopy(address), pickle.loads(pickle.dumps(address))):
        assert (type(same), same, same.raw) == (Address, text, url)


def test_credentials_are_taken_out_of_other_texts():
    address = Address(f"ftp://me:p%40ss@host/a?token={TOKEN}&x=1")
    said = f"no {address.raw}: p%40ss, p@ss, {TOKEN}, 1"
    assert address.without_secrets(said) == "no ftp://host/a?token=***&x=***: ***, ***, ***, 1"
    assert address.cause(error := OSError("no answer")) is error
    outer = OSError("no answer")
    outer.__cause__ = OSError("530 p@ss")
    assert address.cause(outer) is None


# ---- in no text ----


class Guarded(Memory):
    """A store in memory that connects when it is made, with a password, as fsspec's FTP does."""

    protocol = "guarded"
    cachable = False
    store = {}
    pseudo_dirs = [""]
    refused = 0  # the number of connections to refuse
    connections = []  # those that have not ended

    def __init__(self, host, username="", password="", **how):
        super().__init__(**how)
        if Guarded.refused:
            Guarded.refused -= 1
            raise ConnectionRefusedError(111, f"Connection refused to {username}:{password}@{host}")
        Guarded.connections.append(id(self))

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + fsspec.utils.infer_storage_options(path)["path"].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(url):
        options = fsspec.utils.infer_storage_options(url)
        return {name: options[name] for name in ("host", "username", "password") if name in options}

    def __getattribute__(self, name):
        if (
            name in ("ls", "cat_file", "info", "pipe_file", "rm", "open")
            and id(self) not in Guarded.connections
        ):
            raise FileNotFoundError("fsspec's FTP hides in this way that its connection has ended")
        return super().__getattribute__(name)


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    monkeypatch.setattr("wholestep.checkpoints.store._PAUSES", (0.0, 0.0))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield
    Guarded.store.clear()
    Guarded.refused = 0
    Guarded.connections.clear()


class Texts:
    """All that a user meets: output, warnings, results and errors with their causes."""

    def __init__(self, capfd):
        self._capfd = capfd
        self._all = []

    def of(self, call, *arguments, error=None, **options):
        """Return the result of a call, and note all of its texts; it must raise such an error, if
        given.
        """
        result = None
        failure = None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = call(*arguments, **options)
            except BaseException as raised:
                failure = raised
                self._all += [*traceback.format_exception(raised), repr(raised)]
        assert isinstance(failure, error or type(None)), failure
        self._all += [*map(str, warned), repr(result), str(result), *self._capfd.readouterr()]
        return result

    def check(self, *secrets):
        found = "\n".join(self._all)
        for secret in secrets:
            assert secret not in found, found[
                max(0, found.index(secret) - 300) : found.index(secret) + 100
            ]
        return found


class Interrupts(Tells):
    """Ctrl-C in the first epoch."""

    def __init__(self):
        super().__init__(0.5)

    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def raises(error):
    def call(*_, **__):
        raise error

    return call


def attempted(call):
    """Let a call of a store fail with an error of ours, or succeed."""
    try:
        return call()
    except ws.WholestepError as error:
        return traceback.format_exception(error)


@pytest.mark.parametrize(
    ("given", "secrets"), [("s3cret-pw", ["s3cret"]), ("s3cr%40t", ["s3cr%40t", "s3cr@t"])]
)
def test_a_password_is_in_no_text(given, secrets, guarded, tmp_path, monkeypatch, capfd):
    def at(name):
        return f"guarded://me:{given}@host/{name}" + f"?token={TOKEN}" * ("step-" not in name)

    url = at("runs")
    texts = Texts(capfd)
    error = ws.WholestepError

    # a run
    asked = texts.of(ws.Checkpoints, url, keep=1, keep_best=("good", 1, "max"))
    texts.of(dataclasses.asdict, asked)
    how = HOW | {"epochs": 1}
    texts.of(ws.Trainer(small()).fit, X, Y, checkpoints=asked, callbacks=[Tells(0.5)], **how)
    texts.of(ws.Trainer(small()).fit, X, Y, checkpoints=url, **HOW)
    texts.of(ws.Trainer(small()).fit, X + 1, Y, checkpoints=url, **HOW | {"epochs": 9}, error=error)
    texts.of(
        ws.Trainer(small()).fit,
        X,
        Y,
        checkpoints=ws.Checkpoints(url, resume=False),
        **HOW,
        error=error,
    )
    texts.of(lambda: asked.best)
    interrupts = Interrupts()
    texts.of(
        ws.Trainer(small()).fit,
        X,
        Y,
        checkpoints=at("c"),
        callbacks=[interrupts],
        **how,
        error=KeyboardInterrupt,
    )

    # by hand
    trainer = ws.Trainer(small())
    trainer.fit(X, Y, **how)
    saved = texts.of(trainer.save, at("by-hand"))
    texts.of(trainer.save, at("by-hand"), error=error)
    for path in (saved, asked.best, at("by-hand"), asked.folder):
        texts.of(trainer.restore, path)
    texts.of(ws.load_weights, small(), saved)
    for wrong in (at("nothing"), at("by-hand/step-00000099")):
        texts.of(trainer.restore, wrong, error=error)
        texts.of(ws.load_weights, small(), wrong, error=error)
    texts.of(ws.load_weights, small(), url, rename=lambda name: f"no {name}", error=error)

    # the command
    for command in (
        "ls",
        "verify",
        "show",
        "prune --keep 1 --dry-run",
        "prune --keep 1 --keep-best lost:1",
    ):
        for path in (url, at("nothing"), at(f"by-hand/step-{BATCHES:08d}")):
            texts.of(cli.main, ["checkpoint", *command.split(), path])
            texts.of(cli.main, ["checkpoint", *command.split(), path, "--json"])
    texts.of(cli.main, ["checkpoint", "copy", url, at("copies")])
    texts.of(cli.main, ["checkpoint", "copy", url, at(f"by-hand/step-{BATCHES:08d}")])

    # what cannot be a store or a folder
    for wrong in (
        url,
        Path(url),
        url.replace("guarded", "ftp"),
        Path(url.replace("guarded", "ftp")),
    ):
        texts.of(Folder, wrong, error=error)
        texts.of(ws.Checkpoints, tmp_path, local=wrong, error=error)
    texts.of(store.Store, url.replace("guarded", "elsewhere"), error=error)
    texts.of(store.Store, f"guarded://me:{given}@", error=error)
    # the port "s3cret-pw" is no number
    texts.of(store.Store, f"ftp://me:{given}/4@host/runs", error=error)
    texts.of(SharedFolder.of, url, TwoProcesses(), error=error)
    filled(tmp_path / "other", 1, rest=lambda step: {"store": f"guarded://me:{given}@host/other"})
    local = ws.Checkpoints(at("new"), local=tmp_path / "other")
    texts.of(ws.Trainer(small()).fit, X, Y, checkpoints=local, **HOW, error=error)

    # errors of a store that quote the address
    Guarded.refused = 3
    texts.of(store.Store, url, error=error)
    folder = filled(tmp_path / "more", 5)
    for verb in ("ls", "cat_file", "info", "pipe_file", "rm", "makedirs", "_open"):
        kept = store.Store(at("more"))
        for kind in (OSError, ValueError, FileNotFoundError, KeyError):
            with monkeypatch.context() as patch:
                patch.setattr(Guarded, verb, raises(kind(f"cannot reach {url} as me:{given}")))
                calls = [
                    kept.steps,
                    partial(store.push, folder, 5, kept),
                    partial(kept.claim, "me"),
                ]
                for call in (*calls, partial(read_one, url, lambda snapshot: None)):
                    texts.of(attempted, call)
                texts.of(cli.main, ["checkpoint", "ls", url])

    found = texts.check(*secrets, TOKEN)
    assert "guarded://host/runs?token=***" in found
    written = [b"".join(file.getvalue() for file in Guarded.store.values())]
    written += [
        path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and "other" not in path.parts
    ]
    assert not any(
        secret.encode() in content for secret in (*secrets, TOKEN) for content in written
    )


# ---- a store that does not answer ----


URL = "guarded://me:pass@host/runs"


def test_a_refused_connection_is_tried_again_and_an_error_in_the_end(guarded):
    Guarded.refused = 2
    assert store.Store(URL).steps() == []
    Guarded.refused = 3
    match = (
        r"guarded://host/runs must be accessible\. Received: ConnectionRefusedError: .*\(3 "
        r"tries in 0 s\)\. Try"
    )
    with pytest.raises(ws.CheckpointError, match=match):
        store.Store(URL)
    assert Guarded.refused == 0


def test_a_server_that_is_not_there_is_an_error_of_ours(guarded, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = "ftp://me:pass@{}:{}/runs".format(*closed.getsockname())
        assert cli.main(["checkpoint", "ls", url]) == 1
        assert "must be accessible. Received: ConnectionRefusedError" in capsys.readouterr().err
        trainer = ws.Trainer(small())
        for call in (
            partial(trainer.restore, url),
            partial(trainer.fit, X, Y, **HOW, checkpoints=url),
        ):
            with pytest.raises(ws.CheckpointError, match=r"ConnectionRefusedError.*\(3 tries in"):
                call()


def test_a_connection_that_has_ended_is_made_anew(guarded, tmp_path):
    """Also where fsspec says that objects do not exist: nothing is taken for missing, or for an
    unfinished upload.
    """
    folder, kept = pushed(URL, tmp_path, 1)
    folder.write(2, {"a": np.ones(3)}, {})
    calls = {
        "steps": kept.steps,
        "verify": lambda: kept.verify(1).step,
        "claim": lambda: kept.claim("me"),
        "push": lambda: store.push(folder, 2, kept),
        "remove": lambda: kept.remove(1),
        "the end": kept.steps,
    }
    found = {}
    for name, call in calls.items():
        Guarded.connections.clear()
        found[name] = call(), store.Store(URL).steps()
    assert found == {
        "steps": ([1], [1]),
        "verify": (1, [1]),
        "claim": (None, [1]),
        "push": (None, [2, 1]),
        "remove": (None, [2]),
        "the end": ([2], [2]),
    }


class Clock:
    """The clock of a process in which nothing takes time except for calls of a store."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(guarded, monkeypatch):
    made = Clock()
    monkeypatch.setattr("wholestep.checkpoints.store.time", made)
    monkeypatch.setattr("wholestep.checkpoints.store._PAUSES", (1.0, 4.0))
    return made


@pytest.mark.parametrize(
    ("seconds", "tries", "most"),
    [(0, 3, 5), (10, 3, 35), (18, 3, 59), (20, 2, 41), (29, 2, 59), (43, 1, 43)],
)
def test_a_store_that_is_silent_is_tried_for_a_minute(seconds, tries, most, clock, monkeypatch):
    """Its package may have tried several times before an error comes."""
    kept = store.Store(URL)

    def ls(*_, **__):
        clock.now += seconds
        raise OSError(16, "Service Unavailable")

    monkeypatch.setattr(Guarded, "ls", ls)
    words = "1 try" if tries == 1 else f"{tries} tries"
    with pytest.raises(
        ws.CheckpointError, match=rf"OSError: .*Service Unavailable \({words} in {most} s\)"
    ):
        kept.steps()
    assert clock.now == most <= 60


class Slow:
    """A file whose parts take these seconds to write; after a negative number of them, the
    connection breaks.
    """

    def __init__(self, file, clock, seconds):
        self.file = file
        self.clock = clock
        self.seconds = seconds

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)

    def write(self, content):
        seconds = self.seconds.pop(0) if self.seconds else 0
        self.clock.now += abs(seconds)
        if seconds < 0:
            raise ConnectionResetError(104, "Connection reset by peer")
        return self.file.write(content)


@pytest.mark.parametrize(
    ("seconds", "tries"), [([600, 600], 1), ([600, -20], 2), ([600, -20, 300, -20], 3)]
)
def test_a_long_upload_that_breaks_is_tried_again(seconds, tries, clock, tmp_path, monkeypatch):
    """The minute is one without an answer: a part that was written is an answer."""
    kept, opens = slow_store(clock, seconds, monkeypatch)
    store.push(filled_with_parts(tmp_path), 1, kept)
    assert (kept.verify(1).step, len(opens)) == (1, tries)


def test_an_upload_that_breaks_after_a_long_silence_is_an_error(clock, tmp_path, monkeypatch):
    kept, _ = slow_store(clock, [600, -40], monkeypatch)
    match = (
        r"could not be copied to guarded://host/runs\. .*reset by peer \(1 try in 640 "
        r"s\).*complete in"
    )
    with pytest.raises(ws.CheckpointError, match=match):
        store.push(filled_with_parts(tmp_path), 1, kept)


def filled_with_parts(tmp_path):
    """Return a local folder with a checkpoint that is written in three parts."""
    folder = filled(tmp_path / "local")
    folder.write(1, {"a": np.arange(1 << 20)}, {})
    return folder


def slow_store(clock, seconds, monkeypatch):
    """Return a store whose parts take these seconds, and a list of the files opened so far."""
    real = Guarded.open
    opens = []

    def opened(self, path, mode="rb", **how):
        file = real(self, path, mode, **how)
        if "w" not in mode or not path.endswith("safetensors"):
            return file
        opens.append(path)
        return Slow(file, clock, seconds)

    monkeypatch.setattr(Guarded, "open", opened)
    return store.Store(URL), opens
