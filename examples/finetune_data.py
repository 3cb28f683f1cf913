"""Text inside of Python's own library, as characters: for finetune.py."""

import importlib
import inspect
from pydoc_data.topics import topics

import numpy as np

LENGTH = 128
VOCABULARY = 128  # of characters in a row, all ASCII
MODULES = (
    "argparse ast calendar collections csv datetime decimal difflib email.message fractions "
    "gzip inspect io json "
)
MODULES += (
    "logging mailbox operator os pathlib pickle random shutil smtplib socket sqlite3 ssl "
    "statistics string "
)
MODULES += "subprocess tarfile threading typing unittest urllib.request zipfile"


def windows():
    """Return the documentation of Python's language as rows of LENGTH characters, each one sequence
    of weight 1.
    """
    text = "".join(topics.values()).encode("ascii", "ignore")
    tokens = (
        np.frombuffer(text[: len(text) // LENGTH * LENGTH], "uint8")
        .astype("int32")
        .reshape(-1, LENGTH)
    )
    places = np.tile(np.arange(LENGTH, dtype="int32"), (len(tokens), 1))
    ones = np.ones_like(tokens)
    return {
        "tokens": tokens,
        "weights": ones.astype("float32"),
        "segment_ids": ones,
        "positions": places,
    }


def docstrings():
    """Return pairs (name and arguments of a function, first line of its docstring), in random
    order.
    """
    found = {}
    for module in map(importlib.import_module, MODULES.split()):
        classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
        members = [
            each
            for holder in (module, *classes)
            for each in inspect.getmembers(holder, inspect.isroutine)
        ]
        for name, function in members:
            line = (inspect.getdoc(function) or "").partition("\n")[0]
            try:
                text = f"{name}{inspect.signature(function)}\n"
            except (ValueError, TypeError):  # a function of C
                continue
            if name[0] != "_" and 8 < len(line) < LENGTH - len(text) and (text + line).isascii():
                found[line] = text
    pairs = [(text, line) for line, text in sorted(found.items())]
    return [pairs[i] for i in np.random.default_rng(1).permutation(len(pairs))]


def characters(pair):
    """Return the row of a pair: its characters, and their weights."""
    tokens = np.frombuffer("".join((*pair, "\0")).encode(), "uint8").astype("int32")
    return {"tokens": tokens, "weights": (np.arange(len(tokens)) >= len(pair[0])).astype("float32")}
