"""The command line: `stepcheck run`."""

import argparse
import os
import sys

from stepcheck import __version__

shell = None

_UNREAD = 141  # the exit code of shells for it


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    about = "gradcheck for a whole training step."
    parser = argparse.ArgumentParser(prog="stepcheck", description=about)
    parser.add_argument("--version", action="version", version=f"stepcheck {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    shell.add_command(commands)
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


if __name__ == "__main__":
    sys.exit(main())
