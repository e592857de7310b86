"""How the tests start a JVM: quickly, because they start some forty of them.

Without the optimising compiler, which pays only after minutes, and with Spark's classes from an
archive (class data sharing), which is made once in each environment. A start with its first query
takes 25 s of processor time so, and 52 s without both. Without that compiler a JVM has 48 MB for
compiled code, which Spark fills in a minute: it then throws code away and compiles it again.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pyspark

from tests.spark.python_path import ROOT, python_path

_QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    "-XX:+UseSerialGC -Xshare:auto -Xlog:disable"
)
ANY_PORT = {"SPARK_TESTING": "true"}
"""The environment in which a server of Spark Connect takes any free port, instead of 15002.

Spark's own tests do so. With the value "1" the launcher would look for a build of Spark.
"""
_FOLDER = Path(sys.prefix) / "feedapi-tests"
"""Within the environment: an archive is bound to the paths of Spark's jars, and their age."""


@cache
def options() -> str:
    """Return the options of a JVM. Makes the archive where there is none, in half a minute."""
    # Another release of Spark, as Delta's tests have, is no part of this environment.
    if not Path(pyspark.__file__).is_relative_to(sys.prefix):
        return _QUICK
    _FOLDER.mkdir(exist_ok=True)
    archive = _FOLDER / "spark.jsa"
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _make(archive)
    return f"{_QUICK} -XX:SharedArchiveFile={archive}"


def _make(archive: Path) -> None:
    """Run a query in a JVM that notes which classes it loads. It ends after the program."""
    new = archive.with_suffix(".new")
    done = subprocess.run(
        [
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            "--driver-memory",
            "600m",
            "--driver-java-options",
            f"{_QUICK} -XX:ArchiveClassesAtExit={new}",
            str(ROOT / "tests" / "spark" / "load_classes.py"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": python_path(),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    new.rename(archive)
