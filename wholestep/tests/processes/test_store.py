"""A process's reads and writes in the store, and the messages of its heartbeat."""

import json
import threading
import time

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the store is that of jax.distributed"
)


class Client:
    """The client of a store that is a dict."""

    def __init__(self, error):
        self.values = {}
        self.error = error

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise self.error(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        del self.values[key]


@pytest.fixture
def client(monkeypatch):
    from jax._src import distributed

    from wholestep.processes.store import Unreachable

    made = Client(Unreachable)
    monkeypatch.setattr(distributed.global_state, "client", made)
    return made


@pytest.fixture
def store(client):
    from wholestep.processes.store import KeyValueStore

    return KeyValueStore()


@pytest.fixture
def heartbeats(store, monkeypatch):
    """Heartbeats of two processes that beat at once, and the words and exit codes that would end
    their processes.
    """
    from wholestep.processes import group

    ended = []
    monkeypatch.setattr(group, "_INTERVAL", 0.01)
    monkeypatch.setattr(group, "end", lambda words, code: ended.append((words, code)))
    made = [group.Heartbeat(index, store, patience=30.0) for index in range(2)]
    yield made, ended
    for each in made:
        each.end()


def until(holds):
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to hold")


def test_what_was_set_is_there_until_it_is_deleted(store, client):
    store.set("facts/1", {"seed": 7})
    assert store.get("facts/1") == store.read("facts/1") == {"seed": 7}
    assert json.loads(client.values["wholestep/facts/1"]) == {"seed": 7}
    store.delete("facts/1")
    assert store.read("facts/1") is None


def test_only_what_is_set_once_is_kept_in_mind(store):
    store.set("facts/1", 1)
    store.set("beat/0", 1, again=True)
    store.set("beat/0", 2, again=True)
    assert (store.once, store.get("beat/0")) == (["facts/1"], 2)


def test_a_folder_is_read_whole_by_the_names_in_it(store):
    for process in range(2):
        store.set(f"beat/{process}", [process])
    store.set("facts/1", 3)
    assert store.read_all("beat") == [("0", [0]), ("1", [1])]


def test_a_store_that_is_gone_is_no_empty_store(store, client):
    gone = client.error
    client.error = lambda text: gone("UNAVAILABLE")
    with pytest.raises(gone, match="UNAVAILABLE"):
        store.read("verdict")


def test_a_heartbeat_says_what_its_process_is_doing(heartbeats, store):
    (first, _), ended = heartbeats
    first.start()
    first.say("computing update 7", "computing update 7")
    first.count()
    until(lambda: (sign := store.read("beat/0")) and sign[1:3] == ["computing update 7"] * 2)
    number = store.read("beat/0")[0]
    until(lambda: store.read("beat/0")[0] > number)
    assert (first.doing, ended) == ("computing update 7", [])


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("Process 1 failed.", 1), ("Process 1 was asked to end (SIGTERM) while starting.", 143)],
)
def test_a_verdict_ends_every_process_once(verdict, code, heartbeats):
    made, ended = heartbeats
    for each in made:
        each.start()
    made[1].pass_verdict(verdict)
    until(lambda: len(ended) == 2)
    for each in made:
        each.join()
    assert sorted(ended) == [
        (f"{verdict} Process {i} ends too; it was starting.", code) for i in range(2)
    ]


def test_a_process_that_has_ended_its_heartbeat_is_ended_by_nobody(heartbeats):
    made, ended = heartbeats
    made[1].start()
    made[1].join()
    assert "wholestep-processes" not in {thread.name for thread in threading.enumerate()}
    made[1].pass_verdict("Process 0 failed.")
    assert ended == []
    made[1].wait_for_verdict()  # returns at once: it is over
