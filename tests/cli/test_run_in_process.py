"""``feedapi run`` without a process of its own: handlers, policies, log records."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedapi_client.cli.terminal import JSONLines
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
CLOSED = """
from contextlib import asynccontextmanager
@asynccontextmanager
async def handle():
    raise OSError("GET https://x/y?key=k1 for postgres://app:hunter2@db refused, password=hunter2")
    yield
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


@pytest.mark.parametrize("app", [COLLECT], indirect=True, ids=["collect"])
def test_a_feed_with_a_name_may_move(feedapi: Feedapi, url: str, app: str) -> None:
    for place in (url, url.replace("127.0.0.1", "localhost")):
        result = feedapi(*arguments(place, f"{app}:handle", "--feed-name", "payments"))
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


@pytest.mark.parametrize("app", ["async def handle(_): 1 / 0"], indirect=True, ids=["each"])
@pytest.mark.parametrize("key", [(), ("--key", "/n")])
def test_the_limit_of_the_quarantine_is_named_where_it_ends_the_command(
    feedapi: Feedapi, url: str, app: str, key: tuple[str, ...]
) -> None:
    limited = ("--on-failure", "quarantine", "--attempts", "1", "--quarantine-limit", "2")
    result = feedapi(*arguments(url, f"{app}:handle", *limited, *key))
    assert result.exit_code == 3, result.output
    line = result.stderr.splitlines()[-1]
    assert "the handler failed with ZeroDivisionError" in line
    assert "2 events in a row were quarantined before this one" in line
    assert line.endswith(f"({app}.py, line 1)")


@pytest.mark.parametrize("app", [WRONG], indirect=True, ids=["wrong"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("plain", "must be a function with async"),
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


@pytest.mark.parametrize("app", [CLOSED], indirect=True, ids=["closed"])
def test_r19_a_handler_that_can_not_be_opened_says_why_without_secrets(
    feedapi: Feedapi, url: str, app: str
) -> None:
    result = feedapi(*arguments(url, f"{app}:handle"))
    assert result.exit_code == 1
    assert (
        "OSError: GET https://x/y?*** for postgres://***@db refused, password=***" in result.stderr
    )


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


EACH = """
import anyio
handled, running, most = [], set(), 0
async def handle(event):
    global most
    payload = event.json()
    entity = payload["order"]["id"]
    assert entity not in running
    running.add(entity)
    most = max(most, len(running))
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    running.discard(entity)
    handled.append((entity, payload["n"]))
"""
EACH_FAILS = """
async def handle(event):
    raise ValueError("a payload")
"""


@pytest.fixture
def orders(feedapi_publisher: Publisher) -> str:
    orders = [{"n": n, "order": {"id": f"o{n % 4}"}, "a/b~c": [n % 2]} for n in range(40)]
    feedapi_publisher.extend(0, orders)
    assert feedapi_publisher.url is not None
    return feedapi_publisher.url


@pytest.mark.parametrize("app", [EACH], indirect=True, ids=["each"])
@pytest.mark.parametrize(
    ("options", "most"), [((), 4), (("--concurrency", "2"), 2), (("--concurrency", "1"), 1)]
)
def test_with_a_key_each_key_is_handled_in_order_and_keys_at_once(
    feedapi: Feedapi, orders: str, app: str, options: tuple[str, ...], most: int
) -> None:
    result = feedapi(*arguments(orders, f"{app}:handle", "--key", "/order/id", *options))
    assert result.exit_code == 0, result.output
    found = sys.modules[app]
    by_order = {f"o{k}": [n for order, n in found.handled if order == f"o{k}"] for k in range(4)}
    assert by_order == {f"o{k}": list(range(k, 40, 4)) for k in range(4)}
    assert found.most == most
    assert feedapi(*arguments(orders, f"{app}:handle", "--key", "/order/id")).exit_code == 0
    assert len(found.handled) == 40


@pytest.mark.parametrize("app", [EACH], indirect=True, ids=["each"])
def test_a_key_may_be_an_element_below_a_name_with_a_slash_and_a_tilde(
    feedapi: Feedapi, orders: str, app: str
) -> None:
    result = feedapi(*arguments(orders, f"{app}:handle", "--key", "/a~1b~0c/0"))
    assert result.exit_code == 0, result.output
    assert sys.modules[app].most == 2


@pytest.mark.parametrize(
    ("app", "pointer"),
    [(EACH, "/order/number"), (EACH, "/order"), (EACH_FAILS, "/order/id")],
    indirect=["app"],
    ids=["no key", "no value", "fails"],
)
def test_r19_an_event_without_a_key_ends_the_command_as_a_handler_that_fails(
    feedapi: Feedapi, orders: str, app: str, pointer: str
) -> None:
    result = feedapi(*arguments(orders, f"{app}:handle", "--key", pointer))
    assert result.exit_code == 3, result.output
    assert "the handler failed with" in result.stderr
    assert "a payload" not in result.stderr


@pytest.mark.parametrize("app", [EACH], indirect=True, ids=["each"])
def test_an_event_without_a_key_can_go_into_quarantine(
    feedapi: Feedapi, orders: str, app: str, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.append(0, {"n": 40, "order": {"id": None}})
    quarantine = ("--on-failure", "quarantine", "--attempts", "1")
    run = arguments(orders, f"{app}:handle", "--key", "/order/id", *quarantine)
    assert feedapi(*run).exit_code == 0
    assert len(sys.modules[app].handled) == 40
    listed = feedapi("quarantine", "ls", "--store", "cursors.db")
    assert "LookupError" in listed.stdout, listed.output


@pytest.mark.parametrize("app", [COLLECT], indirect=True, ids=["collect"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--key", "order.id"), "--key takes a JSON pointer"),
        (("--key", "/a~2"), "--key takes a JSON pointer"),
        (("--key", ""), "--key takes a JSON pointer"),
        (("--concurrency", "5"), "--concurrency goes with --key"),
        (("--key", "/a", "--max-concurrency", "5"), "--concurrency is how many events"),
        (("--key", "/a", "--concurrency", "0"), "--concurrency"),
        (("--cert", "missing.pem", "--key", "/a"), "--cert"),
    ],
)
def test_options_of_a_key_that_can_not_be_used_are_refused(
    feedapi: Feedapi, url: str, app: str, options: tuple[str, ...], says: str
) -> None:
    result = feedapi(*arguments(url, f"{app}:handle", *options))
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_with_a_key_the_handler_is_one_of_an_event(
    feedapi: Feedapi, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_of_plain.py").write_text("def handle(event): pass\n")
    monkeypatch.chdir(tmp_path)
    result = feedapi(*arguments(url, "app_of_plain:handle", "--key", "/a"))
    sys.modules.pop("app_of_plain", None)
    assert (result.exit_code, "handle(event)" in result.stderr) == (2, True), result.output
