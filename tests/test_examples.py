"""The examples run as they are, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from feedapi_client.testing import Publisher
from tests import warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN_BY = {
    "demo_servers.py": ("examples/exactly_once_postgres.py", "what examples share, no program"),
    "exactly_once_orm.py": ("tests/test_exactly_once_examples.py", "needs PostgreSQL"),
    "exactly_once_postgres.py": ("tests/test_exactly_once_examples.py", "needs PostgreSQL"),
    "relay_to_liftbridge.py": ("tests/liftbridge/test_example.py", "needs a broker"),
    "spark_pipeline.py": ("tests/spark/test_examples.py", "needs a JVM"),
}
"""Examples that another file runs or imports, and why."""
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in RUN_BY)


def run_example(name: str, directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    runner = ["-m", "pytest", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    # pytest rewrites the assertions of a plugin that is not imported yet.
    start = subprocess.run if runner else warm.run
    return start(
        [sys.executable, *(runner or ["-W", "error"]), EXAMPLES / name, *args],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=100,
    )


@pytest.mark.parametrize("name", RUN_BY)
def test_an_example_that_another_file_runs_is_named_there(name: str) -> None:
    file, reason = RUN_BY[name]
    assert name.removesuffix(".py") in (ROOT / file).read_text(encoding="utf-8"), reason


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs_as_it_is(name: str, tmp_path: Path) -> None:
    result = run_example(name, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout


@pytest.mark.parametrize("name", ["first_program.py", "sync_script.py"])
def test_an_example_continues_where_it_ended(
    name: str, tmp_path: Path, feedapi_publisher: Publisher
) -> None:
    assert feedapi_publisher.url is not None
    feedapi_publisher.append(0, {"n": "the first"})
    assert "the first" in run_example(name, tmp_path, feedapi_publisher.url).stdout
    feedapi_publisher.append(0, {"n": "the second"})
    again = run_example(name, tmp_path, feedapi_publisher.url).stdout
    assert "the second" in again
    assert "the first" not in again


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_service_finishes_its_batches_when_it_is_terminated(
    tmp_path: Path, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.append(0, {"entity": "a", "amount": 1.5})
    assert feedapi_publisher.url is not None
    command = [sys.executable, str(EXAMPLES / "run_handler.py"), feedapi_publisher.url]

    async def wait_for_the_service() -> None:
        # The second fetch says that the first one's events were delivered.
        await feedapi_publisher.wait(lambda: feedapi_publisher.counters["fetch"] >= 2, timeout=100)

    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        anyio.run(wait_for_the_service)
        process.terminate()
        printed, errors = process.communicate(timeout=100)
    assert (process.returncode, printed, errors) == (0, "1.50 of revenue from 1 customers\n", "")
