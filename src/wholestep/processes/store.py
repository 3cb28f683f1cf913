"""The key-value store of `jax.distributed`: how the processes of a run talk, outside of every collective.

Reads `jax._src.distributed.global_state`, the only way to that store.
"""

import json
from typing import Any

import jax
from jax._src import distributed

_DAY = 24 * 3600 * 1000  # ms
_KEY = "wholestep/"

Unreachable = jax.errors.JaxRuntimeError  # what every call raises if the store is gone


class Store:
    """What one process reads and writes there, as JSON.

    `once` are the keys that this process has written to stay as they are, until it takes them out of the list.
    """

    def __init__(self) -> None:
        self._client = distributed.global_state.client
        self.once: list[str] = []

    def set(self, key: str, value: object, again: bool = False) -> None:
        """Write a value; `again` over one that may be there."""
        if not again:
            self.once.append(key)
        self._client.key_value_set(_KEY + key, json.dumps(value), allow_overwrite=again)

    def get(self, key: str) -> Any:
        """Return what is there, as soon as it is."""
        return json.loads(self._client.blocking_key_value_get(_KEY + key, _DAY))

    def read(self, key: str) -> Any:
        """Return what is there, or None."""
        try:
            return json.loads(self._client.key_value_try_get(_KEY + key))
        except Unreachable as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def read_all(self, folder: str) -> list[tuple[str, Any]]:
        """Return (name in the folder, what is there) for every key of a folder."""
        found = self._client.key_value_dir_get(f"{_KEY}{folder}/")
        return [(key.rsplit("/", 1)[1], json.loads(value)) for key, value in found]

    def delete(self, key: str) -> None:
        """Let nothing be there."""
        self._client.key_value_delete(_KEY + key)
