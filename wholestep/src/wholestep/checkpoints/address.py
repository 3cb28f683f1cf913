"""Addresses of stores, which are texts without credentials."""

import re
import traceback
from os import PathLike
from typing import TypeGuard
from urllib.parse import unquote

_USER = r"[^/?#@:]*"
_PASSWORD = re.compile(  # a password may hold @, and wrongly /; a number after a colon is a port
    rf"(?<=:/)(/?)({_USER}):(?!:)([^/?#]*|(?!\d*(?:[/?#]|$))(?:(?!::).)*)@"
)
_VALUE = re.compile(r"(?<=[?&])([^=&?]*)=([^&]+)")  # of a query, such as a token
_SHORTEST_PART = 4  # characters of a part of a password
_SHORTEST = 8  # characters of a value of a query that is looked for in other texts
_HIDDEN = "***"


class Address(str):
    """The address of a store, as a text without its password and the values of its query.

    Only `raw` has them: pass it to fsspec alone.

    >>> address = Address("ftp://me:pass@host/runs/a?token=0123456789")
    >>> address, address / "step-00000001"
    ('ftp://host/runs/a?token=***', 'ftp://host/runs/a?token=***/step-00000001')
    >>> address.without_secrets("530 pass is wrong")
    '530 *** is wrong'
    """

    raw: str

    def __new__(cls, url: str) -> "Address":
        """Return the address of a URL, or the same address."""
        if isinstance(url, Address):
            return url
        text = _VALUE.sub(rf"\1={_HIDDEN}", _PASSWORD.sub(r"\1", url))
        return cls._of(text, url)

    @classmethod
    def _of(cls, text: str, raw: str) -> "Address":
        address = super().__new__(cls, text)
        address.raw = raw
        return address

    def __truediv__(self, name: str) -> "Address":
        """Return the address of a name in this folder."""
        return self._of(f"{self}/{name}", f"{self.raw}/{name}")

    @property
    def name(self) -> str:
        """The last name in the path."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The address of the folder around this one."""
        return self._of(self.rpartition("/")[0], self.raw.rpartition("/")[0])

    def stripped(self) -> "Address":
        """Return the address without slashes at its end."""
        return self._of(self.rstrip("/"), self.raw.rstrip("/"))

    def without_secrets(self, text: str) -> str:
        """Return a text, as of an error, without the credentials of this address."""
        text = text.replace(self.raw, self)
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return text

    def cause(self, error: BaseException) -> BaseException | None:
        """Return an error, as the cause of another one; None if its traceback has credentials."""
        text = "".join(traceback.format_exception(error))
        return error if self.without_secrets(text) == text else None

    def _secrets(self) -> list[str]:
        whole = [match[3] for match in _PASSWORD.finditer(self.raw)]
        parts = [part for each in whole for part in re.split("[/?#@]", each)]  # as parsers do
        split = [part for part in parts if len(part) >= _SHORTEST_PART]  # others are in any text
        values = [match[2] for match in _VALUE.finditer(self.raw)]
        secrets = [*whole, *split, *(value for value in values if len(value) >= _SHORTEST)]
        return sorted(filter(None, {*secrets, *map(unquote, secrets)}), key=len, reverse=True)


Location = str | PathLike[str]


def as_location(path: Location) -> Location:
    """Return a path; a remote one as an address, whose text has no credentials."""
    return Address(path) if is_remote(path) else path


def is_remote(path: object) -> TypeGuard[str]:
    """Whether this is the address of a store, such as s3://bucket/runs/a."""
    return isinstance(path, str) and "://" in path
