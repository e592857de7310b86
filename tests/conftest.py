"""Run every async test on asyncio and on trio, and allow no skipped tests in CI."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

_MAX_PROCESSES = 4
_SERVERS = {"postgres", "mariadb", "redis_server", "nats_server"}
_PROCESSES = {"spawn"}
_LOGGERS = ("root", "feedapi_client", "httpx", "httpcore")
_EXAMPLES = {"quick": 25, "whole": 200}
"""Examples of each property: fewer where slow tests are left out."""
FIRST_FILES = (
    "tests/spark/test_delta.py",
    "tests/spark/test_process_kills.py",
    "tests/spark/test_ingest_tables.py",
    "tests/spark/test_dataframe.py",
    "tests/spark/test_pipelines.py",
)
"""The first file of each of four processes, and the second one of the first.

So the long tests that start JVMs of their own keep one process busy, and only the others start the
Spark session that the remaining files share.
"""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the tests of a single file in this process, more of them in up to four processes.

    Two more than there are cores: half of the time the tests wait for servers and deadlines.
    """
    files = [argument for argument in config.args if argument.split("::")[0].endswith(".py")]
    if len(files) == 1 == len(config.args):
        return 0
    return min(_MAX_PROCESSES, (os.cpu_count() or 1) + 2)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the coverage of this process only.

    The processes that tests start are not measured: it would make them slower, and those that tests
    kill leave no figures.
    """
    if not config.getoption("numprocesses", None):
        os.environ.pop("COVERAGE_PROCESS_START", None)
    # A shell without job control ignores SIGINT for what it runs in the background, and so would
    # all processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests start hundreds of Python processes, and each would compile the library anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # There are few cycles, and looking for them every 700 objects takes 8 % of the time.
    gc.set_threshold(10_000, 20, 20)
    _load_examples("quick" if "not slow" in config.getoption("markexpr") else "whole")


def _load_examples(profile: str) -> None:
    for name, examples in _EXAMPLES.items():
        settings.register_profile(
            name,
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize="CI" in os.environ,
            print_blob=True,
        )
    settings.load_profile(profile)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the quick answer leaves out as slow, and run the files with slow tests first.

    Then no process ends long after the others. Left out are tests that need a server or a JVM, and
    the second run of each async test: on trio.
    """
    root = Path(__file__).parents[1]
    first = {root / name: number for number, name in enumerate(FIRST_FILES)}
    heavy = set()
    for item in items:
        if item.get_closest_marker("spark") or _SERVERS.intersection(_fixtures(item)):
            item.add_marker("slow")
        if _PROCESSES.intersection(_fixtures(item)):
            item.add_marker("waits")
        if item.get_closest_marker("waits"):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            heavy.add(item.path)
        elif _runs_on_trio(item):
            item.add_marker("slow")
    spark = {item.path for item in items if item.get_closest_marker("spark")}
    session = {item.path for item in items if "spark" in _fixtures(item)}
    items.sort(
        key=lambda item: (
            first.get(item.path, len(first)),
            item.path not in session,
            item.path not in spark,
            item.path not in heavy,
        )
    )


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


def _runs_on_trio(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("anyio_backend") == "trio"


@pytest.fixture(autouse=True)
def logging_unchanged() -> Iterator[None]:
    """Fail a test that leaves a level of logging behind: later tests would miss their records."""
    before = _levels()
    yield
    assert _levels() == before


def _levels() -> dict[str, int]:
    """Return the levels that were set, by the names of their loggers."""
    return {
        each.name: each.level
        for each in [logging.root, *logging.root.manager.loggerDict.values()]
        if isinstance(each, logging.Logger)
        if each.level and each.name.startswith(_LOGGERS)
    }


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Reasons for skips that no installation can remove.
_BY_DESIGN = ("the store declares", "SQLAlchemy runs on asyncio only", "memory has no transactions")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail in CI when a test was skipped because something is not installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI") or exitstatus != pytest.ExitCode.OK:
        return
    reasons = {
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    }
    missing = sorted(reason for reason in reasons if not reason.startswith(_BY_DESIGN))
    if missing:
        reporter.write_line(
            f"tests were skipped, which CI does not allow: {'; '.join(missing)}", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
