"""Keras: the hooks, the reference, and the listeners of both engines."""

from importlib.util import find_spec

from stepcheck.errors import message, pip_install

# In the folder of a clone, `wholestep` is a folder of no package: without an origin.
if getattr(find_spec("wholestep"), "origin", None) is None:
    must = "stepcheck needs the package wholestep for models of Keras."
    attempt = f"{pip_install('wholestep', 'stepcheck[keras]')}."
    raise ModuleNotFoundError(
        message(must, "it is not installed", attempt), name="wholestep"
    )
