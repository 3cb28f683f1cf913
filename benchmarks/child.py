"""`python -m benchmarks.child TASK ARGUMENTS`: carry out one measurement in this process and print
it as JSON.
"""

import importlib
import json
import resource
import sys

_TASKS = {
    "audit": "benchmarks.audit",
    "checkpoints": "benchmarks.checkpoints",
    "speed": "benchmarks.speed",
    "draws": "benchmarks.draws",
    "ragged": "benchmarks.ragged",
    "first": "benchmarks.first",
    "imports": "benchmarks.imports",
    "inputs": "benchmarks.inputs",
    "memory": "benchmarks.memory",
    "models": "benchmarks.models",
    "paths": "benchmarks.paths",
    "processes": "benchmarks.processes",
}


def main() -> None:
    """Import no more than the task's own module: the import of Keras is itself measured."""
    task, arguments = sys.argv[1:]
    found = importlib.import_module(_TASKS[task]).measure(**json.loads(arguments))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB on Linux
    print(json.dumps({"found": found, "peak": peak}))


if __name__ == "__main__":
    main()
