"""``feedapi run`` without a process of its own: handlers, policies, log records."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedapi_client.cli.run.logs import JSONLines
from feedapi_client.cli.run.workers import monitor_of, worker_number
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi

COLLECT = """
handled = []
async def handle(batch):
    for event in batch.events:
        handled.append(event.json()["n"])
"""
FAIL = """
async def handle(batch):
    if any(event.json()["n"] == 1 for event in batch.events):
        raise ValueError("a payload")
"""
OPENED = """
from contextlib import asynccontextmanager
log = []
@asynccontextmanager
async def handle():
    log.append("opened")
    async def each(batch):
        log.append(len(batch.events))
    yield each
    log.append("closed")
"""
WRONG = """
def plain(batch): pass
nothing = None
def no_manager(): return 5
"""


@pytest.fixture
def app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    """Write the application's module, and return its name."""
    name = f"app_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(request.param)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def url(feedapi_publisher: Publisher) -> str:
    feedapi_publisher.extend(0, [{"n": n} for n in range(3)])
    assert feedapi_publisher.url is not None
    return feedapi_publisher.url


def arguments(url: str, handler: str, *more: str) -> tuple[str, ...]:
    return ("run", url, "--handler", handler, "--store", "cursors.db", "--no-follow", *more)


@pytest.mark.parametrize("app", [COLLECT], indirect=True, ids=["collect"])
def test_each_event_is_handled_once(feedapi: Feedapi, url: str, app: str) -> None:
    for _ in range(2):
        result = feedapi(*arguments(url, f"{app}:handle"))
        assert result.exit_code == 0, result.output
    assert sys.modules[app].handled == [0, 1, 2]


@pytest.mark.parametrize("app", [OPENED], indirect=True, ids=["opened"])
def test_a_handler_that_is_opened_is_closed(feedapi: Feedapi, url: str, app: str) -> None:
    result = feedapi(*arguments(url, f"{app}:handle"))
    assert result.exit_code == 0, result.output
    log = sys.modules[app].log
    assert (log[0], sum(log[1:-1]), log[-1]) == ("opened", 3, "closed")


@pytest.mark.parametrize("app", [FAIL], indirect=True, ids=["fail"])
@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ((), 3),
        (("--on-failure", "retry", "--attempts", "1"), 3),
        (("--on-failure", "quarantine", "--attempts", "1"), 0),
    ],
)
def test_r19_a_handler_that_fails_is_code_3_or_quarantined_and_its_text_is_not_repeated(
    feedapi: Feedapi, url: str, app: str, policy: tuple[str, ...], code: int
) -> None:
    result = feedapi(*arguments(url, f"{app}:handle", *policy))
    assert result.exit_code == code, result.output
    if code:
        assert "the handler failed with ValueError" in result.stderr
    if code == 0:
        listed = feedapi("quarantine", "ls", "--store", "cursors.db")
        assert "ValueError" in listed.output


@pytest.mark.parametrize("app", [WRONG], indirect=True, ids=["wrong"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("plain", "has to be an 'async def'"),
        ("nothing", "is no function"),
        ("missing", "can't be imported"),
        ("no_manager", "takes no batch"),
    ],
)
def test_what_is_no_handler_is_named(
    feedapi: Feedapi, url: str, app: str, function: str, says: str
) -> None:
    result = feedapi(*arguments(url, f"{app}:{function}"))
    assert result.exit_code in (1, 2)
    assert says in result.stderr


def test_a_log_record_is_one_line_of_json_with_its_fields() -> None:
    record = logging.makeLogRecord(
        {"name": "feedapi_client.x", "levelname": "INFO", "msg": "a %s", "args": ("\x1b[2J",)}
    )
    record.partition = 7
    try:
        raise ValueError("gone")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JSONLines().format(record)
    assert line.isprintable()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["partition"]) == ("INFO", "feedapi_client.x", 7)
    assert found["message"] == "a \x1b[2J"
    assert found["traceback"].endswith("ValueError: gone")


def test_workers_have_monitors_at_consecutive_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert monitor_of(None, 3) is None
    assert monitor_of("0.0.0.0:9464", 2) == "0.0.0.0:9466"
    assert monitor_of("[::1]:9464", 1) == "[::1]:9465"
    assert monitor_of("localhost:0", 1) == "localhost:0"
    assert worker_number() is None
    monkeypatch.setenv("FEEDAPI_RUN_WORKER", "2")
    assert worker_number() == 2
