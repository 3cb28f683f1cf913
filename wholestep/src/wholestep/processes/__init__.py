"""The processes of a run: one, or several that compute every update together.

`group` needs JAX, which processes of a run on TensorFlow and the launching process do not.
"""

from wholestep.processes.protocol import Exchange, Processes, SingleProcess

__all__ = ["Exchange", "Processes", "SingleProcess", "group", "launch"]
