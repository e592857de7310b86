"""``feedapi quarantine``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import Batch, FeedConsumer, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi

_HANDLERS = """
import contextlib, errno

seen = []

async def handle(batch):
    seen.extend(event.json() for event in batch.events)

async def refuse(batch):
    raise ValueError("database down", batch.events[0].json())

@contextlib.asynccontextmanager
async def opened():
    yield handle

@contextlib.asynccontextmanager
async def broken():
    raise ConnectionRefusedError(errno.ECONNREFUSED, "postgresql://user:hidden@db")
    yield

def not_async(batch):
    seen.append(batch)

def opens_not_async():
    return contextlib.nullcontext(not_async)
"""


@pytest.fixture
def quarantined(feedapi_publisher: Publisher, store: Path) -> Path:
    """A store of cursors with a quarantine that holds two of four events."""
    feedapi_publisher.extend(0, [{"n": n, "secret": "payload"} for n in range(4)])

    async def handle(batch: Batch) -> None:
        for event in batch.events:
            if event.json()["n"] % 2:
                raise ValueError("a secret in the error")

    async def consume() -> None:
        assert feedapi_publisher.url is not None
        async with (
            SQLiteCursorStore(store) as cursors,
            FeedConsumer(feedapi_publisher.url, store=cursors, follow=False) as consumer,
        ):
            await consumer.run(handle, on_failure="quarantine")

    anyio.run(consume)
    return store


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with handlers, in the current directory."""
    (tmp_path / "app_of_the_test.py").write_text(_HANDLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "app_of_the_test", raising=False)
    return "app_of_the_test"


def _ids(feedapi: Feedapi, store: Path, *args: object) -> list[str]:
    found: list[dict[str, Any]] = orjson.loads(
        feedapi("quarantine", "ls", "--store", store, "--json", *args).stdout
    )
    return [event["id"] for event in found]


def test_ls_shows_where_events_come_from_but_no_payloads(
    feedapi: Feedapi, feedapi_publisher: Publisher, quarantined: Path
) -> None:
    result = feedapi("quarantine", "ls", "--store", quarantined)
    assert result.exit_code == 0
    assert result.stdout.count("ValueError") == 2
    assert str(feedapi_publisher.url) in result.stdout
    assert "secret" not in result.stdout
    assert len(_ids(feedapi, quarantined)) == 2
    assert _ids(feedapi, quarantined, "--partition", 1) == []
    assert _ids(feedapi, quarantined, "--name", "other") == []


def test_show_prints_error_and_payload(feedapi: Feedapi, quarantined: Path) -> None:
    id = _ids(feedapi, quarantined)[0]
    found = orjson.loads(feedapi("quarantine", "show", id, "--store", quarantined).stdout)
    assert (found["error"], found["data"]) == (
        "a secret in the error",
        {"n": 1, "secret": "payload"},
    )
    assert (
        feedapi("quarantine", "show", id, "--store", quarantined, "--raw").stdout
        == '{"n":1,"secret":"payload"}\n'
    )


def test_show_of_an_unknown_event_is_reported_on_one_line(
    feedapi: Feedapi, quarantined: Path
) -> None:
    result = feedapi("quarantine", "show", "nothing", "--store", quarantined)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_replay_calls_the_handler_with_each_event(
    feedapi: Feedapi, quarantined: Path, handlers: str
) -> None:
    result = feedapi(
        "quarantine", "replay", "--all", "--store", quarantined, "--handler", f"{handlers}:handle"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("2 events handled, 0 failed again and stay\n")
    assert [event["n"] for event in sys.modules[handlers].seen] == [1, 3]
    assert _ids(feedapi, quarantined) == []


def test_replay_and_drop_print_their_results_as_json(
    feedapi: Feedapi, quarantined: Path, handlers: str
) -> None:
    one, other = _ids(feedapi, quarantined)
    where = ("--store", quarantined, "--json")

    def replay(handler: str) -> tuple[int, Any]:
        words = ("quarantine", "replay", one, "--handler", f"{handlers}:{handler}", *where)
        result = feedapi(*words)
        return result.exit_code, orjson.loads(result.stdout)

    code, failed = replay("refuse")
    (event,) = failed["events"]
    assert (code, failed["handled"], failed["failed"], event["id"]) == (1, 0, 1, one)
    assert "ValueError" in event["error"]
    assert "secret" not in event["error"]
    handled = {"handled": 1, "failed": 0, "events": [{"id": one, "error": None}]}
    assert replay("handle") == (0, handled)
    asked = feedapi("quarantine", "drop", other, *where, input="n\n")
    assert (asked.exit_code, "Delete 1 events for good?" in asked.stderr) == (1, True)
    dropped = feedapi("quarantine", "drop", other, *where, "--yes")
    assert (dropped.exit_code, orjson.loads(dropped.stdout)) == (0, {"deleted": 1})


def test_events_that_fail_again_stay(feedapi: Feedapi, quarantined: Path, handlers: str) -> None:
    id = _ids(feedapi, quarantined)[0]
    result = feedapi(
        "quarantine", "replay", id, "--store", quarantined, "--handler", f"{handlers}:refuse"
    )
    assert result.exit_code == 1
    assert result.stdout == (
        f"{id}  failed again: ValueError\n0 events handled, 1 failed again and stay\n"
    )
    assert "payload" not in result.output
    assert len(_ids(feedapi, quarantined)) == 2


@pytest.mark.parametrize("handler", ["nothing_of_the_kind:handle", "os:nothing", "os:sep"])
def test_a_handler_that_can_not_be_imported_is_reported_on_one_line(
    feedapi: Feedapi, quarantined: Path, handler: str
) -> None:
    result = feedapi("quarantine", "replay", "--all", "--store", quarantined, "--handler", handler)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_drop_asks_for_confirmation(feedapi: Feedapi, quarantined: Path) -> None:
    first, second = _ids(feedapi, quarantined)
    assert (
        feedapi("quarantine", "drop", "--all", "--store", quarantined, input="n\n").exit_code == 1
    )
    assert (
        feedapi("quarantine", "drop", first, "--store", quarantined, "--yes").stdout
        == "1 events deleted\n"
    )
    assert _ids(feedapi, quarantined) == [second]
    assert (
        feedapi("quarantine", "drop", "--all", "--store", quarantined, "--yes").stdout
        == "1 events deleted\n"
    )
    assert "the quarantine is empty" in feedapi("quarantine", "ls", "--store", quarantined).stdout


def test_drop_needs_ids_or_all(feedapi: Feedapi, quarantined: Path) -> None:
    assert feedapi("quarantine", "drop", "--store", quarantined).exit_code == 2
    assert feedapi("quarantine", "drop", "x", "y", "--all", "--store", quarantined).exit_code == 2


def test_drop_all_of_one_feed_and_consumer(feedapi: Feedapi, quarantined: Path) -> None:
    drop = ("quarantine", "drop", "--store", quarantined, "--yes")
    for choice in (("http://elsewhere", "--all"), ("--all", "--name", "nobody")):
        assert feedapi(*drop, *choice).stdout == "0 events deleted\n"
    event, *_ = orjson.loads(feedapi("quarantine", "ls", "--store", quarantined, "--json").stdout)
    assert feedapi(*drop, event["id"], "--name", "nobody").stdout == "0 events deleted\n"
    assert feedapi(*drop, event["url"], "--all").stdout == "2 events deleted\n"


def test_a_file_that_does_not_exist_is_not_created(feedapi: Feedapi, store: Path) -> None:
    assert feedapi("quarantine", "ls", "--store", store).exit_code == 1
    assert not store.exists()


@pytest.mark.parametrize("scheme", ["", "sqlite+aiosqlite:///"])
def test_a_store_where_nothing_was_ever_quarantined_is_an_empty_quarantine(
    feedapi: Feedapi, feedapi_publisher: Publisher, store: Path, scheme: str
) -> None:
    assert feedapi("cat", feedapi_publisher.url, "--store", store).exit_code == 0
    where = ("--store", f"{scheme}{store}")
    listed = feedapi("quarantine", "ls", *where)
    assert (listed.exit_code, listed.stdout) == (0, "the quarantine is empty\n")
    assert feedapi("quarantine", "ls", *where, "--json").stdout.strip() == "[]"
    assert feedapi("quarantine", "show", "x", *where).exit_code == 1


def test_a_quarantine_in_a_database_given_by_url(feedapi: Feedapi, quarantined: Path) -> None:
    result = feedapi(
        "quarantine", "drop", "--all", "--yes", "--store", f"sqlite+aiosqlite:///{quarantined}"
    )
    assert result.stdout == "2 events deleted\n"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@127.0.0.1:1/db",
        "redis://me:secret@localhost/0",
    ],
)
def test_r19_a_quarantine_that_can_not_be_opened_is_reported_without_its_password(
    feedapi: Feedapi, url: str
) -> None:
    result = feedapi("quarantine", "ls", "--store", url)
    assert result.exit_code == 1
    assert "secret" not in result.output
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("form", ["opened", "handle"])
def test_replay_takes_every_form_of_handler_that_run_takes(
    feedapi: Feedapi, quarantined: Path, handlers: str, form: str
) -> None:
    result = feedapi(
        "quarantine", "replay", "--all", "--store", quarantined, "--handler", f"{handlers}:{form}"
    )
    assert result.exit_code == 0, result.output
    assert [event["n"] for event in sys.modules[handlers].seen] == [1, 3]


@pytest.mark.parametrize(
    ("form", "code", "says"),
    [
        ("not_async", 2, "must be a function with async"),
        ("opens_not_async", 2, "must be a function with async"),
        ("broken", 1, "ConnectionRefusedError: the connection was refused"),
    ],
)
def test_a_handler_that_can_not_work_is_refused_before_any_event(
    feedapi: Feedapi, quarantined: Path, handlers: str, form: str, code: int, says: str
) -> None:
    result = feedapi(
        "quarantine", "replay", "--all", "--store", quarantined, "--handler", f"{handlers}:{form}"
    )
    assert result.exit_code == code
    assert says in result.stderr
    assert "hidden" not in result.output
    assert sys.modules[handlers].seen == []
    assert len(_ids(feedapi, quarantined)) == 2
