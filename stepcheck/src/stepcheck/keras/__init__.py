"""Keras: the hooks, the reference, and the listeners of both engines."""

from importlib.util import find_spec

from stepcheck.errors import message

if find_spec("wholestep") is None:
    must = "stepcheck needs the package wholestep for models of Keras."
    raise ModuleNotFoundError(
        message(must, "it is not installed", 'pip install "stepcheck[keras]".'),
        name="wholestep",
    )
