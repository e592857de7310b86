"""``feedapi run`` without a process of its own: handlers, policies, keys, log records."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from feedapi_client.cli.terminal import JSONLines
from feedapi_client.testing import Publisher, faults
from tests.cli.invoke import Invoked, Row, play

pytestmark = pytest.mark.usefixtures("feedapi", "short_waits")
Play = Callable[..., Invoked]

APPLICATION = """
import anyio, contextlib, errno, sqlite3

handled, log, running, most = [], [], set(), 0

async def handle(batch):
    handled.extend(event.json()["n"] for event in batch.events)

async def fails(_):
    raise ValueError("a payload")

async def fails_at_1(batch):
    if any(event.json()["n"] == 1 for event in batch.events):
        raise ValueError("a payload")

async def fences(batch):
    with contextlib.closing(sqlite3.connect("cursors.db")) as c, c:
        c.execute("UPDATE feedapi_cursors SET revision = revision + 7")

@contextlib.asynccontextmanager
async def opened():
    log.append("opened")
    async def each(batch):
        log.append(len(batch.events))
    yield each
    log.append("closed")

@contextlib.asynccontextmanager
async def closed():
    raise OSError("GET https://x/y?key=k1 for postgres://app:hunter2@db refused, password=hunter2")
    yield

async def each(event):
    global most
    entity = event.json()["order"]["id"]
    assert entity not in running
    running.add(entity)
    most = max(most, len(running))
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    running.discard(entity)
    handled.append((entity, event.json()["n"]))

def plain(batch): pass
def opens_plain(): return contextlib.nullcontext(plain)
def no_manager(): return 5
nothing = None
"""
LINES = APPLICATION.splitlines()


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Return a function that gives the application's module, once it is imported."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    (tmp_path / "broken.py").write_text("raise KeyError('secret')")
    monkeypatch.chdir(tmp_path)
    yield lambda: sys.modules["shop"]
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(feedapi_publisher: Publisher, app: object) -> Play:
    """Return a function that runs rows: a handler, and more options."""
    orders = [{"n": n, "order": {"id": f"o{n % 4}"}, "a/b~c": [n % 2]} for n in range(40)]
    feedapi_publisher.extend(0, orders)
    places = {"URL": feedapi_publisher.url}

    def start(*rows: Row, **more: object) -> Invoked:
        words = "run URL --store cursors.db --no-follow --handler"
        return play([row._replace(words=f"{words} {row.words}") for row in rows], **(places | more))

    return start


def failed(run: Play, words: str) -> str:
    """Return what stderr has of a handler that failed."""
    row = Row(words, 3, input="")  # there are log records, too
    errors = run(row).stderr
    assert "a payload" not in errors
    return str(errors)


def test_each_event_is_handled_once(run: Play, app: Callable[[], ModuleType]) -> None:
    run(Row("shop:handle"), Row("shop:handle"), Row("shop:handle --feed-name payments"))
    assert app().handled == list(range(40))


def test_a_handler_that_is_opened_is_closed(run: Play, app: Callable[[], ModuleType]) -> None:
    run(Row("shop:opened"))
    log = app().log
    assert (log[0], sum(log[1:-1]), log[-1]) == ("opened", 40, "closed")


REFUSED = [
    Row("shop:missing", 2, "can't be imported"),
    Row("nothing:handle", 2, "can't be imported"),
    Row("shop", 2, "MODULE:FUNCTION"),
    Row("broken:handle", 2, "KeyError in the module"),
    Row("shop:plain", 2, "must be a function with async"),
    Row("shop:plain --key /a", 2, "handle(event)"),
    Row("shop:opens_plain", 2, "must be a function with async"),
    Row("shop:nothing", 2, "is no function"),
    Row("shop:no_manager", 2, "takes no batch"),
    Row("shop:closed", 1, "can't be opened: OSError"),
    Row("shop:each --key order.id", 2, "--key takes a JSON pointer"),
    Row("shop:each --key /a~2", 2, "--key takes a JSON pointer"),
    Row("shop:each --key ''", 2, "--key takes a JSON pointer"),
    Row("shop:each --key /a --max-concurrency 0", 2, "--max-concurrency"),
    Row("shop:each --key /a --cert missing.pem", 2, "--cert"),
    *(
        Row(f"shop:handle --monitor={address}", 2, "takes HOST:PORT")
        for address in ("nowhere", "127.0.0.1:70000", "::1:80", "127.0.0.1:-1")
    ),
    *(
        Row(f"shop:handle --journal{days}", 2, "--journal")
        for days in ("=0", "=-1", "=nan", "=1e300", "=7days", "=", "")
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.words)
def test_r19_what_can_not_be_used_is_named_without_secrets(run: Play, row: Row) -> None:
    output = run(row).output
    assert not any(secret in output for secret in ("secret", "hunter2"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("shop:fails_at_1", "ValueError"),
        ("shop:fails_at_1 --on-failure retry --attempts 1", "ValueError"),
        ("shop:fails --key /order/id", "ValueError"),
        ("shop:each --key /order/number", "LookupError"),
        ("shop:each --key /order", "LookupError"),
    ],
)
def test_r19_a_handler_that_fails_is_code_3_without_the_text_of_the_error(
    run: Play, words: str, says: str
) -> None:
    errors = failed(run, words)
    assert f"feedapi: the handler failed with {says}" in errors.splitlines()[-1]


def test_a_failing_event_goes_into_quarantine_up_to_a_limit(
    run: Play, feedapi_publisher: Publisher, app: Callable[[], ModuleType]
) -> None:
    aside = "--on-failure quarantine --attempts 1"
    run(Row(f"shop:fails_at_1 {aside}"))
    listed = play([Row("quarantine ls --store cursors.db", says="ValueError")])
    assert listed.stdout.count("\n") == 2
    feedapi_publisher.append(0, {"n": 40, "order": {"id": None}})
    run(Row(f"shop:each --key /order/id --name keyed {aside}"))
    assert len(app().handled) == 40
    play([Row("quarantine ls --store cursors.db --name keyed", says="LookupError")])
    for key in ("", " --key /n"):
        errors = failed(run, f"shop:fails {aside} --quarantine-limit 2 --name limited{key}")
        last = errors.splitlines()[-1]
        assert "2 events in a row were quarantined before this one" in last
        assert last.endswith(f"(shop.py, line {LINES.index('async def fails(_):') + 2})")


@pytest.mark.parametrize(("options", "most"), [("", 4), (" --max-concurrency 2", 2)])
def test_with_a_key_each_key_is_handled_in_order_and_keys_at_once(
    run: Play, app: Callable[[], ModuleType], options: str, most: int
) -> None:
    run(Row(f"shop:each --key /order/id{options}"), Row("shop:each --key /order/id"))
    found = app()
    by_order = {f"o{k}": [n for order, n in found.handled if order == f"o{k}"] for k in range(4)}
    assert by_order == {f"o{k}": list(range(k, 40, 4)) for k in range(4)}
    assert found.most == most
    run(Row("shop:each --key /a~1b~0c/0 --name other"))  # an element below a name of that kind
    assert len(found.handled) == 80


def test_another_consumer_of_the_name_is_code_4_and_no_feed_code_1(
    run: Play, feedapi_publisher: Publisher
) -> None:
    run(Row("shop:fences", 4, "another consumer", input=""))
    feedapi_publisher.fail(faults.Status(404), on="discovery", times=None)
    run(Row("shop:handle", 1, "404", input=""))


def test_a_journal_is_kept(run: Play) -> None:
    run(Row("shop:handle --journal 7"))
    with closing(sqlite3.connect("cursors.db")) as database:
        (count,) = database.execute("SELECT count(*) FROM feedapi_cursors_journal").fetchone()
    assert count >= 1


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
