"""The key-value store of `jax.distributed`: communication of processes outside of collectives.

Reads `jax._src.distributed.global_state`, the only way to the store.
"""

import json
from typing import Any

import jax
from jax._src import distributed

_DAY = 24 * 3600 * 1000  # ms
_KEY = "wholestep/"

Unreachable = jax.errors.JaxRuntimeError  # raised by every call if the store is gone


class Store:
    """One process's access to the store, with JSON values.

    `once` lists the keys that this process has written once, for a later deletion.
    """

    def __init__(self) -> None:
        self._client = distributed.global_state.client
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
        found = self._client.key_value_dir_get(f"{_KEY}{folder}/")
        return [(key.rsplit("/", 1)[1], json.loads(value)) for key, value in found]

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._client.key_value_delete(_KEY + key)
