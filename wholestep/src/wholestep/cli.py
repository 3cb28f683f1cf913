"""The command line: `wholestep launch | checkpoint | audit | doctor`."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from wholestep import __version__, aliases, backend
from wholestep.checkpoints import command
from wholestep.errors import PeerError, SpecificationError, message
from wholestep.processes import launch

_UNREAD = 141  # the exit code of shells for it


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code, 0 if all went well."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    if "command" not in arguments:
        parser.print_help()
        return 0
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    return code


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="wholestep",
        description="Train Keras 3 models on JAX or TensorFlow, one whole step, however you cut "
        "the batch.",
        epilog="Training loops of PyTorch and Keras are checked by the package stepcheck.",
    )
    parser.add_argument("--version", action="version", version=f"wholestep {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_launch(commands)
    command.add_commands(commands)
    _add_audit(commands)
    doctor = commands.add_parser(
        "doctor",
        help="show versions, engine, devices and memory",
        description="Show versions, engine, devices and memory, and reasons why training would be "
        "slow: for a report of an error. Exit codes: 0, or 1 without an engine.",
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    try:
        facts, slow = backend.circumstances()
    except SpecificationError as error:
        print("\n".join(backend.machine()), flush=True)
        return _fail(error, 1)
    print("\n".join([*facts, *(f"slow: {reason}" for reason in slow)]))
    return 0


def _fail(error: object, code: int) -> int:
    print(error, file=sys.stderr)
    return code


def _add_audit(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "audit",
        help="see `stepcheck run`",
        description="The former name of `stepcheck run`, a command of the package stepcheck: "
        "check a script's training loop.",
        add_help=False,
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(command=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    try:
        return aliases.command(arguments.arguments)
    except SpecificationError as error:
        return _fail(error, 2)


def _add_launch(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes",
        description="Run a training script in several processes that make every update together, "
        "on the JAX engine. With -n, start them on this machine. Without, join the run that this "
        "process was started for by Slurm, Open MPI, Kubernetes or a TPU pod, as jax.distributed "
        "finds out. The exit code is 2 if the run cannot begin, or else the first of a process "
        "that is not 0.",
    )
    parser.add_argument(
        "-n", "--num-processes", type=_count, help="how many processes to start on this machine"
    )
    parser.add_argument("script", help="the Python script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments"
    ).required = False
    parser.set_defaults(command=_launch)


def _launch(arguments: argparse.Namespace) -> int:
    if not Path(arguments.script).is_file():
        must = "The script must be a file."
        return _fail(message(must, arguments.script, "the path of a Python file."), 2)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if os.environ["KERAS_BACKEND"] == "jax" and find_spec("jax") is None:
        must = "Several processes need the JAX engine."
        return _fail(message(must, backend.installed(), backend.installing("jax")), 2)
    if arguments.num_processes is not None:
        return launch.launch(arguments.num_processes, arguments.script, arguments.arguments)
    import keras

    engine = keras.backend.backend()
    if engine != "jax":
        text = message(
            "Several processes need the JAX engine.",
            f"KERAS_BACKEND={engine}",
            "set KERAS_BACKEND=jax, or build the model under tf.distribute.MirroredStrategy in "
            "one process.",
        )
        return _fail(text, 2)
    from wholestep.processes import group

    try:
        group.join()
    except PeerError as error:
        return _fail(error, 2)
    return launch.run(arguments.script, arguments.arguments)


def _count(text: str) -> int:
    """Return an integer of at least 1, or raise argparse's error."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1. Received: {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
