"""The text of the command line: its help, and the command to run where too little was
stated.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepcheck.errors import message
from stepcheck.report.words import listed

ABOUT = {
    "run": (
        "Run a training script, unchanged, for a few updates, and say whether each was the update "
        "that is meant. A compiled Keras model and the arrays of its `fit` need not be named, nor "
        "does a Trainer of Transformers. Arguments of the script stand after `--`. In a notebook, "
        "write `with stepcheck.watch(model, data=(x, y), loss=loss_fn) as report:` in a cell. Exit "
        "codes: 0 if the updates are right, 1 if something was found, 2 if they were not judged, "
        "or too little was stated."
    ),
    "record": (
        "Run a training script, unchanged, for a few updates, and write their trace to a file, "
        "for `stepcheck diff`. Arguments of the script stand after `--`. Exit codes: 0 if updates "
        "were recorded, 2 if not, or if the script failed."
    ),
    "diff": (
        "Say where two recorded runs begin to differ: in which update, and in which part of it. "
        "Exit codes: 0 if they are equal, 1 if they differ, 2 if they cannot be compared."
    ),
}
HELP = {
    "run": "judge the updates of a training script",
    "record": "write the trace of a training script to a file",
    "diff": "compare two traces",
    "script": "the Python script",
    "--model": "the model that is trained, by its name in the script: net, trainer.model",
    "--data": 'its rows, by their names: x,y or x,y,w or \'batch["x"],batch["y"]\'',
    "--loss": "the loss that is meant, by its name; or a loss of Keras, such as mse",
    "--optimizer": "the optimizer that is meant, by its name",
    "--learning-rate": "the rate that is meant",
    "--rows": "how each pass over the data takes the rows: once, or shuffled anew, too",
    "--updates": "updates after which the script ends (default: 40)",
    "--json": "print JSON; the script's output goes to stderr",
    "--html": "write the report with pictures, too",
    "-o": "the file of the trace",
    "a": "the file of a trace",
    "b": "the file of the other",
    "--bits": "whether numbers must be equal to the bit",
}
_MUST = "--model, --data and --loss must state what is meant, as the script does not."
_LOSS = (
    "LOSS is a name of the script, such as criterion or torch.nn.functional.mse_loss, or a loss of "
    "Keras, such as mse."
)
_NEEDED = {"model": "NET", "data": "X,Y", "loss": "LOSS"}


def not_a_script(path: str) -> str:
    """Return the message for a path that is no Python script."""
    must = "The script must be a file of Python."
    attempt = "the path of a .py file."
    if path.endswith(".ipynb"):
        attempt = "in a cell, `with stepcheck.watch(model, data=(x, y), loss=loss_fn) as report:`."
    return message(must, path, attempt)


def misplaced(command: str, arguments: Sequence[str]) -> str:
    """Return the message for arguments that a command does not have: of a script,
    perhaps.
    """
    given = shlex.join(arguments)
    must = "Arguments of the script must stand after `--`."
    return message(
        must, given, f"stepcheck {command} train.py [options] -- {given}"
    )


def no_folder(path: str) -> str:
    """Return the message for a file whose folder does not exist."""
    must = "The folder of the trace must exist."
    return message(
        must, path, "the path of a file in one, such as before.trace."
    )


def unwatched(error: BaseException | None) -> str:
    """Return why nothing was watched, where no model was called."""
    how = "the script calls no model of Keras, and no module of PyTorch"
    if error is not None:
        how = f"the script ended with {type(error).__name__}: {error}"
    return f"Nothing was watched: {how}."


def unknown(argument: str, text: str, near: Sequence[str]) -> str:
    """Return the message for a name that has no value in the script."""
    must = f"--{argument} must be known in one of the script's functions, or in its module."
    return message(must, text, f"{', '.join(near) or 'a name of the script'}.")


def understated(
    script: str,
    stated: Mapping[str, str],
    seen: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """Yield in lines the command to run, and the names that it may be filled in with.

    Args:
        script: its path.
        stated: names by option.
        seen: objects of the script by name, for each option; an option is filled in
            where they leave one choice.

    >>> import numpy as np
    >>> [*understated("train.py", {}, {"model": {"net": 1}, "data": {"x": np.ones((8, 3))}})][-1]
    'Seen in the script: model net; data x (8, 3).'
    """
    data = seen.get("data", {})
    most = max(map(len, data.values()), default=0)
    longest = [name for name, own in data.items() if len(own) == most]
    arrays = [",".join(longest)] * (len(longest) == 2)  # inputs and labels
    sets = [name for name, own in data.items() if not hasattr(own, "shape")]
    choices = {**seen, "data": sets or arrays}
    options = {**_NEEDED}
    for kind in _NEEDED:
        if len(choices.get(kind, ())) == 1:
            (options[kind],) = choices[kind]
    options |= stated
    if not {*_NEEDED} <= {*stated}:
        command = f"stepcheck run {shlex.quote(script)} {_options(options)}"
        yield message(_MUST, _options(stated) or "none of them", command)
    if options["loss"] == _NEEDED["loss"]:
        yield _LOSS
    known = {kind: tuple(objects) for kind, objects in seen.items()}
    known["data"] = tuple(
        f"{name} {tuple(getattr(own, 'shape', (len(own),)))}"
        for name, own in data.items()
    )
    told = [f"{kind} {listed(own)}" for kind, own in known.items() if own]
    if told:
        yield f"Seen in the script: {'; '.join(told)}."


def _options(named: Mapping[str, str]) -> str:
    return " ".join(
        f"--{option} {shlex.quote(text)}" for option, text in named.items()
    )
