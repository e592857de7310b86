"""Run every async test on asyncio and on trio, and allow no skipped tests in CI."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from feedapi_client import Limits, RetryPolicy
from tests import components
from tests.servers import (
    _mariadb,
    _postgres,
    _redis_server,
    folder_in_memory,
    mariadb,
    postgres,
    redis_server,
)

__all__ = ["_mariadb", "_postgres", "_redis_server", "mariadb", "postgres", "redis_server"]

_MAX_PROCESSES = 4
_JVM_TIMEOUT = 360
"""Seconds for a test that may start JVMs while other processes start theirs."""
_SERVED = {"postgres", "mariadb", "redis_server", "nats_server", "spawn"}
"""Fixtures of servers, and of processes of the library."""
_LOGGERS = ("root", "feedapi_client", "httpx", "httpcore")
_QUICK = "not slow"
_FILE_MARKS = re.compile(r"^pytestmark = (\[[^]]*]|.*)", re.MULTILINE)
_SLOW_MARK = re.compile(r"pytest\.mark\.(slow|spark)\b")
TOUCHED = {
    "PostgreSQL and MariaDB": (
        *(
            f"tests/stores/test_drivers.py::test_{test}[{driver}-asyncio"
            for test in (
                "r05_cursor_and_effect_stand_or_fall_together",
                "r17_of_several_transactions_at_once_all_but_one_are_refused",
            )
            for driver in ("psycopg", "asyncpg", "SQLAlchemy mysql+asyncmy")
        ),
    ),
    "Redis": (
        "tests/stores/test_redis.py::TestOnRedis::test_a_save_survives_the_loss_of_the_script_cache",
        "tests/stores/test_redis.py::TestOnRedis::test_prefixes_are_apart",
    ),
    "Liftbridge over NATS": (
        "tests/liftbridge/test_publisher.py::test_a_publish_is_stored_and_returns_its_ack",
        "tests/liftbridge/test_at_least_once.py::test_splits_are_followed_in_order",
        "tests/liftbridge/test_reader.py::test_a_reader_resumes_after_any_batch",
        "tests/liftbridge/test_command.py::test_it_relays_to_the_end_and_continues_from_its_store",
        "tests/liftbridge/test_groups.py::test_members_divide",
        "tests/liftbridge/test_groups.py::test_a_group_goes_on_after_a_crash",
        "tests/liftbridge/test_example.py",
    ),
    "Spark": (
        "tests/spark/test_dataframe.py::test_batch_holds_every_event_of_every_partition",
        "tests/spark/test_exactly_once.py::test_plan_of_a_driver_that_died_is_taken_up_while_the_feed_is_down",
        "tests/spark/test_ingest.py::test_each_run_adds_the_new_events_and_counts_them",
    ),
    "Delta": ("tests/spark/test_delta.py::test_delta_tables_are_exact_or_refused",),
    "nginx": tuple(
        f"tests/deployments/test_deployments.py::test_r02_r10_versions_in_turn[{loop}-two tokens"
        for loop in ("asyncio", "trio")
    ),
    "a browser": ("tests/monitor/test_page.py::test_it_draws_a_split_while_it_happens",),
}
"""The tests marked ``touch``: each real component still works with the library."""
_EXAMPLES = {"quick": 25, "whole": 200}
"""Examples of each property: fewer where slow tests are left out."""
_QUICK_SEEDS = 2
"""Seeds of a test that the quick answer takes: 0 and 1."""
BROKER_CRASH = "the real broker crashed"
"""A property of a test's report: the first lines of what the broker wrote."""
FIRST_FILES = (
    "tests/spark/test_delta.py",
    "tests/spark/test_delta_writes.py",
    "tests/spark/test_process_kills.py",
    "tests/spark/test_ingest_tables.py",
    "tests/spark/test_pipelines.py",
    "tests/spark/test_dataframe.py",
    "tests/crash/test_crash.py",
    "tests/crash/test_crash_drivers.py",
)
"""The first file of each of four processes, the second ones of the first two, and what comes then.

So the long tests that start JVMs of their own keep two processes busy, and only the others start
the Spark session that the remaining files share. A file of one test brings the next one with it.
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
    # Everything is `pytest tests`; a marker or a path chooses for itself.
    if config.args_source is config.ArgsSource.TESTPATHS:
        if not config.option.markexpr:
            config.option.markexpr = _QUICK
        elif config.option.markexpr == "touch":
            names = [name.split("::")[0] for names in TOUCHED.values() for name in names]
            config.args[:] = dict.fromkeys(names)
    if config.option.markexpr == "touch":
        os.environ.setdefault(components.NO_JVM_ARCHIVE, "1")
    # A shell without job control ignores SIGINT for what it runs in the background, and so would
    # all processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests start hundreds of Python processes, and each would compile the library anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Stores wait for the disk at each commit, and here nothing need survive the machine.
    if (folder := folder_in_memory()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", folder)
    # There are few cycles, and looking for them every 700 objects takes 8 % of the time.
    gc.set_threshold(10_000, 20, 20)
    _share_certificates()
    _load_examples("quick" if _QUICK in config.getoption("markexpr") else "whole")


def _share_certificates() -> None:
    """Let clients that tests make without `verify` share one TLS context.

    Loading the certificates takes longer than most tests, which speak plain HTTP.
    """
    create = httpx.create_ssl_context
    default = functools.cache(lambda *environment: create())

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None or not trust_env:
            return create(verify, cert, trust_env)
        return default(*map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))

    pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", shared)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the quick answer leaves out as slow, and run the files with slow tests first.

    Then no process ends long after the others. Left out are tests that need a server or a JVM, and
    the second run of each async test: on trio. Tests of a client without async have no second run,
    because only their server is async.
    """
    items[:] = [item for item in items if not (_param(item, "sync") and _runs_on_trio(item))]
    root = Path(__file__).parents[1]
    touched = tuple(name for names in TOUCHED.values() for name in names)
    if config.option.markexpr == "touch" and len(config.args) > 1:
        gone = [name for name in touched if not any(i.nodeid.startswith(name) for i in items)]
        if gone:
            raise pytest.UsageError(f"TOUCHED names tests that are gone: {', '.join(gone)}")
    first = {root / name: number for number, name in enumerate(FIRST_FILES)}
    heavy = set()
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_JVM_TIMEOUT))
        if item.nodeid.startswith(touched):
            item.add_marker("touch")
        served = item.get_closest_marker("spark") or _SERVED.intersection(_fixtures(item))
        if served or (_param(item, "seed") or 0) >= _QUICK_SEEDS:
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
    return _param(item, "anyio_backend") == "trio"


def _param(item: pytest.Item, name: str) -> Any:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(name)


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
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """The backend, on virtual time where the test is marked so."""
    name = str(request.param)
    if not request.node.get_closest_marker("virtual_time"):
        return name
    from tests.testing.virtual_time import virtual_backend

    return virtual_backend(name)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the defaults short that a test waits out in this process, and is not about."""
    for options, name, seconds in (
        (Limits, "settle_time", 0.3),
        (RetryPolicy, "refused_for", 1.0),
    ):
        monkeypatch.setitem(options.__init__.__kwdefaults__, name, seconds)


# Reasons for skips that no installation can remove.
_BY_DESIGN = ("the store declares", "the driver runs on asyncio only", "memory has no transactions")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build what has to be built before the tests begin, whose time limits are short."""
    config = session.config
    if hasattr(config, "workerinput") or _QUICK in config.getoption("markexpr"):
        return
    paths = [Path(argument.split("::")[0]).absolute() for argument in config.args]
    for component, names in {
        "liftbridge": ("docs", "liftbridge"),
        "feedapi-go": ("peers",),
    }.items():
        folders = [Path(__file__).parent / name for name in names]
        if any(a.is_relative_to(b) or b.is_relative_to(a) for a in folders for b in paths):
            components.available(component)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for the quick answer that has slow tests only."""
    if config.option.markexpr != _QUICK or not collection_path.match("test_*.py"):
        return None
    marks = _FILE_MARKS.search(collection_path.read_text(encoding="utf-8"))
    return True if marks and _SLOW_MARK.search(marks[0]) else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process noted that runs tests."""
    components.used.update(getattr(node, "workeroutput", {}).get("components", ()))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say at the very end what the quick answer left out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.option.markexpr == _QUICK:
        reporter.write_line(
            "left out: the tests that need servers, a JVM, a broker, a browser, trio or some "
            "seconds; `pytest tests` runs everything"
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail in CI when a test was skipped because something is not installed."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["components"] = sorted(components.used)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI") or exitstatus != pytest.ExitCode.OK:
        return
    missing = sorted(
        reason
        for reason in _skipped(reporter)
        if not reason.startswith(_BY_DESIGN) and not components.left_out(reason)
    )
    if missing:
        reporter.write_line(
            f"tests were skipped, which CI does not allow: {'; '.join(missing)}", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell which components the tests used, and what the missing ones would have tested."""
    lines = components.table(components.used, _skipped(terminalreporter))
    if lines:
        terminalreporter.section("components")
        for line in lines:
            terminalreporter.write_line(line)
    for test, crash in dict.fromkeys(_broker_crashes(terminalreporter)):
        terminalreporter.write_line(f"the real broker crashed during {test}: {crash}")


def _broker_crashes(reporter: Any) -> Iterator[tuple[str, str]]:
    """Yield tests during which the real broker crashed and was started again, passed or not."""
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == BROKER_CRASH:
                    yield report.nodeid, " / ".join(value.splitlines())


def _skipped(reporter: Any) -> Counter[str]:
    """Return the reasons of skipped tests, with how many tests each skipped."""
    return Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
