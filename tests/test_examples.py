"""The examples run as they are, each as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED_ELSEWHERE = ("demo_servers", "exactly_once", "relay_", "spark_")
"""Those that need a server or a JVM, and what they share, have tests of their own."""
PROGRAMS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(TESTED_ELSEWHERE)
)


def _run(name: str, directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    pytest_first = ["-m", "pytest", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    return subprocess.run(
        [sys.executable, *(pytest_first or ["-W", "error"]), EXAMPLES / name, *args],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=100,
    )


def test_there_are_examples() -> None:
    assert {
        "first_program.py",
        "run_handler.py",
        "sync_script.py",
        "live_status.py",
        "test_your_consumer.py",
    } <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs_as_it_is(name: str, tmp_path: Path) -> None:
    result = _run(name, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout


@pytest.mark.parametrize("name", ["first_program.py", "sync_script.py"])
def test_an_example_goes_on_where_it_ended(
    name: str, tmp_path: Path, feedapi_publisher: Publisher
) -> None:
    assert feedapi_publisher.url is not None
    feedapi_publisher.append(0, {"n": "the first"})
    assert "the first" in _run(name, tmp_path, feedapi_publisher.url).stdout
    feedapi_publisher.append(0, {"n": "the second"})
    again = _run(name, tmp_path, feedapi_publisher.url).stdout
    assert "the second" in again
    assert "the first" not in again


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_service_ends_by_a_signal(tmp_path: Path, feedapi_publisher: Publisher) -> None:
    feedapi_publisher.append(0, {"entity": "a", "amount": 1.5})
    assert feedapi_publisher.url is not None
    command = [sys.executable, str(EXAMPLES / "run_handler.py"), feedapi_publisher.url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        while feedapi_publisher.counters["fetch"] < 2:
            assert process.poll() is None
        process.terminate()
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (0, "1.50 of revenue from 1 customers\n", "")
