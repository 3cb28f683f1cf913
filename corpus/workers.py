"""Processes that run loops of the corpus, one after the other."""

import json
import os
import select
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corpus.loops import FOLDER, Loop
from corpus.table import Row, row

ROOT = FOLDER.parent
LONGEST = 600  # seconds
MOST = 40  # loops of one process, which keeps what they compiled
_LAST_WORDS = 200  # letters
# With more threads, those of PyTorch that wait count as seconds of the processor.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def environment(loop: Loop) -> str:
    """Return the folder of a loop's virtual environment, which the Makefile makes."""
    of_torch = ".venv-trainers" if loop.needs else ".venv-torch"
    return of_torch if loop.engine == "torch" else ".venv"


def rows(loops: Iterable[Loop], *, jobs: int = 1, is_alone: bool = False) -> Iterator[Row]:
    """Yield the rows of loops, by environment and engine.

    Args:
        jobs: the number of processes that run at once.
        is_alone: whether each loop has a process of its own.
    """
    ordered = sorted(loops, key=_kind)
    with closing(Runner(is_alone=is_alone)) as runner, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(runner.row, ordered)


def _kind(loop: Loop) -> tuple[str, str]:
    return environment(loop), loop.engine


class Runner:
    """Runs loops in processes, each of which takes all loops of one environment and engine.

    A loop that fails, and one whose header asks for it, runs in a process of its own.
    """

    def __init__(self, *, is_alone: bool = False):
        self._is_alone = is_alone
        self._held = threading.local()
        self._workers: list[Worker] = []

    def row(self, loop: Loop) -> Row:
        """Return the row of a loop, run in this thread's process."""
        if not loop.is_stated:
            return row(loop, {"not_run": "its intention cannot be stated in a call"})
        if not _python(loop).exists():
            return row(loop, {"not_run": f"{environment(loop)} is missing: make corpus"})
        is_alone = self._is_alone or loop.is_alone
        worker = self._worker(loop, is_alone)
        is_first = worker.num_loops == 0
        facts = worker.answer(loop)
        has_failed = "failed" in facts
        if is_alone or has_failed:
            self._close_worker()
        if has_failed and not is_first:
            return self.row(loop)
        return row(loop, facts)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()

    def _worker(self, loop: Loop, is_alone: bool) -> "Worker":
        worker = getattr(self._held, "worker", None)
        if worker and (is_alone or worker.kind != _kind(loop) or worker.num_loops >= MOST):
            self._close_worker()
            worker = None
        if worker is None:
            worker = self._held.worker = Worker(loop)
            self._workers.append(worker)
        return worker

    def _close_worker(self) -> None:
        self._held.worker.close()
        self._held.worker = None


class Worker:
    """A process for the loops of one environment and engine."""

    def __init__(self, loop: Loop):
        self.kind = _kind(loop)
        self.num_loops = 0
        self._folder = TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors")
        sources = [ROOT, ROOT / "stepcheck" / "src", ROOT / "wholestep" / "src"]
        paths = {"PYTHONPATH": os.pathsep.join(map(str, sources))}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [_python(loop), "-m", "corpus.present", loop.engine],
                cwd=self._folder.name,
                env=os.environ | paths | _ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def answer(self, loop: Loop) -> dict[str, Any]:
        """Return the facts of a loop's row; after a failure the process must be closed."""
        questions = self._process.stdin
        answers = self._process.stdout
        assert questions
        assert answers
        self.num_loops += 1
        questions.write(f"{loop.name}\n")
        questions.flush()
        is_ready, _, _ = select.select([answers], [], [], LONGEST)
        if not is_ready:
            return {"failed": f"longer than {LONGEST} seconds"}
        line = answers.readline()
        return json.loads(line) if line else {"failed": self._last_words()}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _last_words(self) -> str:
        lines = self._errors.read_text().strip().splitlines() or ["ended without a word"]
        return lines[-1][:_LAST_WORDS]


def _python(loop: Loop) -> Path:
    return ROOT / environment(loop) / "bin" / "python"
