"""The processes of a Spark driver: start, look up, kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.spark.python_path import ROOT, python_path


class DriverProcess:
    """``python -m tests.spark.driver`` in a session of its own. What it writes goes to `log`.

    The default staging location is in the folder of the log.
    """

    def __init__(self, given: dict[str, Any], log: Path) -> None:
        self._log = log
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": python_path(),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TMPDIR": str(log.parent),
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", json.dumps(given)],
                cwd=ROOT,
                env=environment,
                stderr=output,
                stdout=output,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float) -> int:
        """Wait until it ends and return its exit code."""
        return self._process.wait(timeout)

    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-400_000:]

    def kill(self) -> None:
        """Send SIGKILL to the driver, its JVM, the executors and the Python workers."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the driver."""
        for pid in self._session():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def executors(self) -> list[int]:
        """The executors' JVMs."""
        return [pid for pid in self._session() if _is_executor(pid)]

    def workers(self) -> list[int]:
        """The Python workers of the executors, and what starts them. There may be none."""
        parents = self._session()
        executors = {pid for pid in parents if _is_executor(pid)}
        daemons = {pid for pid, parent in parents.items() if parent in executors}
        return [pid for pid, parent in parents.items() if parent in executors | daemons]

    def _session(self) -> dict[int, int]:
        """Its processes with their parents.

        Python workers have a process group of their own, but the same session.
        """
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == self._process.pid:
                    found[int(stat.parent.name)] = int(fields[1])
        return found


def _is_executor(pid: int) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return "CoarseGrainedExecutorBackend" in command
    return False
