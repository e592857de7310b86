"""Run every async test on asyncio and on trio, and allow no skipped tests in CI."""

from __future__ import annotations

import os

import pytest

# .ci/run measures this process. The processes that tests start are not measured: it would make them
# slower, and those that tests kill leave no figures.
os.environ.pop("COVERAGE_PROCESS_START", None)


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
