"""The key-value store of `jax.distributed`, and exchanges through it, outside of collectives."""

import json
from typing import Any

import jax

from wholestep.errors import PeerError, message
from wholestep.jax_private import store_client
from wholestep.processes.protocol import T

_DAY = 24 * 3600 * 1000  # ms
_KEY = "wholestep/"

Unreachable = jax.errors.JaxRuntimeError  # raised by every call if the store is gone


class KeyValueStore:
    """One process's access to the store, with JSON values.

    `once` lists the keys that this process has written once, for a later deletion.
    """

    def __init__(self) -> None:
        self._client = store_client()
        self.once: list[str] = []

    def set(self, key: str, value: object, again: bool = False) -> None:
        """Write a value; `again` allows to overwrite."""
        if not again:
            self.once.append(key)
        self._client.key_value_set(_KEY + key, json.dumps(value), allow_overwrite=again)

    def get(self, key: str) -> Any:
        """Return a value, after waiting until it exists."""
        return json.loads(self._client.blocking_key_value_get(_KEY + key, _DAY))

    def read(self, key: str) -> Any:
        """Return a value, or None if it does not exist."""
        try:
            return json.loads(self._client.key_value_try_get(_KEY + key))
        except Unreachable as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def read_all(self, folder: str) -> list[tuple[str, Any]]:
        """Return (name in the folder, value) for every key of a folder."""
        pairs = self._client.key_value_dir_get(f"{_KEY}{folder}/")
        return [(key.rsplit("/", 1)[1], json.loads(value)) for key, value in pairs]

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._client.key_value_delete(_KEY + key)


class StoreExchange:
    """Calls in the same order in all processes; if one makes a different call, all raise PeerError.

    Args:
        name: distinguishes this sequence from the sequences of other threads.
        outer: the sequence of the main thread, if this is another.
    """

    def __init__(
        self, index: int, count: int, name: str = "", outer: "StoreExchange | None" = None
    ):
        self.index = index
        self.count = count
        self.store = KeyValueStore()
        self.number = 0  # of the last call
        self._name = name
        self._outer = outer

    def key(self, kind: str) -> str:
        """Return the key of a kind of value of the last call."""
        return f"{self._name}{kind}/{self.number}"

    def broadcast(self, value: T, what: str) -> T:
        """Return process 0's value."""
        self.number += 1
        if self.index == 0:
            self.store.set(self.key("shared"), [what, value])
        call, shared = self.store.get(self.key("shared"))
        self._check({0: call, self.index: what})
        return shared

    def all_gather(self, value: T, what: str) -> list[T]:
        """Return every process's value."""
        self.number += 1
        earlier = self.store.once
        self.store.once = []
        key = self.key("gathered")
        everything = self.key("all")
        self.store.set(f"{key}/{self.index}", [what, value])
        if self.index == 0:
            self.store.set(everything, [self.store.get(f"{key}/{i}") for i in range(self.count)])
        gathered = self.store.get(everything)
        for old in earlier:  # all processes are here, so none reads these any more
            self.store.delete(old)
        self._check({i: call for i, (call, _) in enumerate(gathered)})
        return [value for _, value in gathered]

    def close(self) -> None:
        """Leave the remaining keys to the outer sequence, which deletes them in its next call."""
        if self._outer is not None:
            self._outer.store.once.extend(self.store.once)
            self.store.once = []

    def _check(self, calls: dict[int, str]) -> None:
        """Refuse different calls of processes."""
        if len(set(calls.values())) > 1:
            first: dict[str, int] = {}
            for i, call in calls.items():
                first.setdefault(call, i)
            received = "; ".join(f"process {i} is {call}" for call, i in first.items())
            must = "All processes of a run must make the same calls, in the same order."
            attempt = "call fit, steps, save and restore alike in every process."
            raise PeerError(message(must, received, attempt))
