"""How the tests start a JVM: quickly, because they start some forty of them.

Without the optimising compiler, which pays only after minutes, and with Spark's classes from an
archive (class data sharing), which is made once in each environment. A start with its first query
takes 25 s of processor time so, and 52 s without both. Without that compiler a JVM has 48 MB for
compiled code, which Spark fills in a minute: it then throws code away and compiles it again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pyspark

from feedapi_client.spark import ensure_java
from tests import components
from tests.spark.python_path import ROOT, python_path

_QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
    "-XX:+UseSerialGC -Xshare:auto -Xlog:disable"
)
ANY_PORT = {"SPARK_TESTING": "true"}
"""The environment in which a server of Spark Connect takes any free port, instead of 15002.

Spark's own tests do so. With the value "1" the launcher would look for a build of Spark.
"""
_SPARK = Path(pyspark.__file__).parent
_FOLDER = (
    Path(sys.prefix) if _SPARK.is_relative_to(sys.prefix) else _SPARK.parent
) / "feedapi-tests"
"""With Spark, in this environment or that of Delta's tests: an archive is bound to the paths of
Spark's jars, and their age."""


@cache
def options() -> str:
    """Return the options of a JVM. Makes the archives where there are none."""
    java = ensure_java()
    name = hashlib.sha256(f"{Path(java.program).resolve()} {java.version}".encode()).hexdigest()
    archive = _FOLDER / f"spark-{name[:12]}.jsa"
    base = _FOLDER / f"java-{name[:12]}.jsa"
    if components.NO_JVM_ARCHIVE not in os.environ:
        with components.locked(_FOLDER / "lock"):
            if not archive.exists():
                _make(archive, _make_base(java.program, base))
    if not archive.exists():
        return _QUICK
    archives = [str(path) for path in (base, archive) if path.exists()]
    return f"{_QUICK} -XX:SharedArchiveFile={os.pathsep.join(archives)}"


def _make_base(java: str, base: Path) -> list[str]:
    """Make the archive of Java's own classes, which not every Java has. Return its options."""
    has_one = [java, "-XX:+UseSerialGC", "-Xshare:on", "-version"]
    if subprocess.run(has_one, capture_output=True, check=False).returncode == 0:
        return []
    file = f"-XX:SharedArchiveFile={base}"
    make = [java, "-XX:+UseSerialGC", "-Xshare:dump", file]
    subprocess.run(make, capture_output=True, check=True)
    return [file]


def _make(archive: Path, base: list[str]) -> None:
    """Run a query in a JVM that notes which classes it loads. It ends after the program."""
    new = archive.with_suffix(".new")
    submit = [str(_SPARK / "bin" / "spark-submit")]
    submit += ["--driver-memory", "600m", "--driver-java-options"]
    submit += [" ".join([_QUICK, *base, f"-XX:ArchiveClassesAtExit={new}"])]
    done = subprocess.run(
        [*submit, str(ROOT / "tests" / "spark" / "load_classes.py")],
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
