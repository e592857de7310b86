"""What a Python worker can find out of the Spark that started it: is the master local, and so, where may epochs be staged without being told."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from feedapi_client.spark.options import OptionError

_ANCESTORS = 4
_LOCAL = "local[*]"


def staging_location(given: str | None) -> str:
    """Where epochs are staged: as given, or a folder of the user's own on this machine when the master is local. Raises `OptionError` elsewhere."""
    if given is not None:
        return given
    master = spark_master()
    if master is None or not is_local(master):
        raise OptionError(
            f"feedapi source: option stagingLocation is missing: with master {master or 'unknown'} the executors need a place that they share with the "
            "driver, such as s3://bucket/folder, gs://…, az://… or file:///shared/folder"
        )
    return _own_folder().as_uri()


def is_local(master: str) -> bool:
    """Whether the executors run inside the driver. ``local-cluster`` starts processes of their own."""
    return master == "local" or master.startswith("local[")


def spark_master() -> str | None:
    """The master, read off the command line of the JVM that this process descends from; None where there is none to read.

    PySpark tells a data source nothing of the session. What this misses (a master set by the application itself under ``spark-submit``) the executors
    notice: a task that doesn't see its plan fails before it fetches.
    """
    pid = os.getppid()
    for _ in range(_ANCESTORS):
        arguments = _command_line(pid)
        if any(argument.startswith("org.apache.spark.") for argument in arguments):
            return _master_of(arguments)
        pid = _parent(pid)
        if pid <= 1:
            break
    return None


def _master_of(arguments: Sequence[str]) -> str:
    master = os.environ.get("MASTER") or _LOCAL
    properties: list[str] = []
    for at, argument in enumerate(arguments):
        name, following = argument, arguments[at + 1] if at + 1 < len(arguments) else ""
        if name == "--master":
            return following
        if name in ("--conf", "-c") and following.startswith("spark.master="):
            return following.partition("=")[2]
        if argument.startswith("-Dspark.master="):
            return argument.partition("=")[2]
        if name == "--properties-file":
            properties.append(following)
    if os.environ.get("SPARK_CONF_DIR"):
        properties.append(os.path.join(os.environ["SPARK_CONF_DIR"], "spark-defaults.conf"))
    return next((found for file in properties if (found := _master_in(file))), master)


def _master_in(file: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (
        line.replace("=", " ", 1).split(None, 1)
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    )
    return next(
        (pair[1].strip() for pair in pairs if len(pair) == 2 and pair[0] == "spark.master"), None
    )


def _command_line(pid: int) -> list[str]:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        )
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[1]
        )
    except (OSError, IndexError, ValueError):
        return 0


def _own_folder() -> Path:
    """A folder that no other user of the machine may write to."""
    folder = Path(tempfile.gettempdir()) / f"feedapi-staging-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OptionError(
            f"feedapi source: {folder} belongs to another user: set option stagingLocation"
        )
    return folder
