"""The quarantine in a database of Django, and in the admin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

from feedapi_client import FeedKey
from feedapi_client.model import make_event
from feedapi_client.quarantine import list_events
from feedapi_client.quarantine.record import QuarantinedEvent, quarantined
from tests.django.databases import execute, registered, set_up
from tests.django.test_transactions import effects, using

set_up()

from django.contrib.auth.models import User  # noqa: E402 - Django has its settings

from feedapi_client.django import DjangoQuarantineStore  # noqa: E402
from feedapi_client.django.admin import replay_here  # noqa: E402
from feedapi_client.django.command import ConsumeCommand  # noqa: E402

__all__ = ["using"]

pytestmark = pytest.mark.slow
FEED = FeedKey("https://service/feed", "mine", {"event-types": "a;b"})
OTHER = FeedKey("https://service/feed", "MINE")
LIST = "/admin/feedapi/eventinquarantine/"


def record(n: int = 0, feed: FeedKey = FEED, raw: bytes | None = None) -> QuarantinedEvent:
    event = make_event(3, raw or json.dumps({"n": n}).encode(), {"h": "\x00"})
    return quarantined(feed, event, "c" * 10_000, n, ValueError("bad\x00 \ud800"))


@pytest.fixture
def store(using: str) -> Iterator[DjangoQuarantineStore]:
    store = DjangoQuarantineStore(using)
    yield store
    asyncio.run(store.aclose())


def kept(store: DjangoQuarantineStore) -> list[QuarantinedEvent]:
    async def listed() -> list[QuarantinedEvent]:
        return [event async for event in list_events(store)]

    return asyncio.run(listed())


class Replay(ConsumeCommand):
    """Inserts an effect; n = 1 fails."""

    def apply(self, batch: Any) -> None:
        for event in batch:
            n = event.json()["n"]
            execute(self.using, f"INSERT INTO effects VALUES ({n})")
            if n == 1:
                raise ZeroDivisionError


def test_r05_a_replayed_event_and_its_effect_stand_or_fall_together(
    store: DjangoQuarantineStore, using: str
) -> None:
    """The handler commits within its own block."""
    events = [record(n) for n in range(3)]
    asyncio.run(store.add(events))
    command = Replay()
    command.using = using
    ids = [event.id for event in events]
    handled, failures = replay_here(using, command.handle_batch, ids)
    assert (handled, [(id, type(error)) for id, error in failures]) == (
        2,
        [(events[1].id, ZeroDivisionError)],
    )
    assert (effects(using), kept(store)) == ([0, 2], [events[1]])


@pytest.mark.parametrize("commits", [False, True])
def test_a_replay_within_the_transaction_of_a_request_is_rolled_back_with_it(
    store: DjangoQuarantineStore, using: str, commits: bool
) -> None:
    """`ATOMIC_REQUESTS`."""

    def handle(batch: Any) -> None:
        execute(using, "INSERT INTO effects VALUES (9)")
        if commits:
            batch.commit()

    asyncio.run(store.add([event := record()]))
    with transaction.atomic(using=using):
        assert replay_here(using, handle, [event.id]) == (1, [])
        transaction.set_rollback(True, using=using)
    assert (effects(using), kept(store)) == ([], [event])
    assert replay_here(using, handle, [event.id]) == (1, [])
    assert (effects(using), kept(store)) == ([9], [])


# In the admin


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Client]:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "admin.db")}
    with registered(database, "default"):
        call_command("migrate", verbosity=0)
        execute("default", "CREATE TABLE effects (n integer)")
        User.objects.create_superuser("operator")
        store = DjangoQuarantineStore()
        asyncio.run(store.add([record(0), record(1), record(2, raw=b"\xff<b>")]))
        asyncio.run(store.aclose())
        client = Client()
        client.force_login(User.objects.get())
        yield client


def ids() -> list[str]:
    return [row[0] for row in execute("default", "SELECT id FROM feedapi_quarantine ORDER BY id")]


def act(client: Client, action: str, chosen: list[str], **more: str) -> str:
    data = {"action": action, "_selected_action": chosen, **more}
    return client.post(LIST, data, follow=True).content.decode()


def test_the_admin_lists_and_shows_events(admin: Client) -> None:
    page = admin.get(LIST).content.decode()
    assert all(id in page for id in ids())
    assert "ValueError" in page
    for id, text in zip(
        ids(), ("&quot;n&quot;: 0", "&quot;n&quot;: 1", "\\xff&lt;b&gt;"), strict=True
    ):
        shown = admin.get(f"{LIST}{id}/change/").content.decode()
        assert text in shown
        assert 'name="_save"' not in shown
    assert admin.get(f"{LIST}add/").status_code == 403


def test_r16_a_publisher_does_not_decide_how_large_a_page_of_the_admin_is(admin: Client) -> None:
    store = DjangoQuarantineStore()
    asyncio.run(store.add([record(9, raw=b"x" * 3_000_000)]))
    asyncio.run(store.aclose())
    page = admin.get(f"{LIST}{ids()[-1]}/change/")
    assert page.status_code == 200
    assert len(page.content) < 2_000_000
    with CaptureQueriesContext(connections["default"]) as queries:
        admin.get(LIST)
    listed = [query["sql"] for query in queries if "feedapi_quarantine" in query["sql"]]
    assert listed
    assert not any("payload" in sql for sql in listed)


@pytest.mark.parametrize("time", [1 << 62, -(1 << 62)])
def test_the_admin_shows_a_row_that_no_store_wrote(admin: Client, time: int) -> None:
    execute("default", f"UPDATE feedapi_quarantine SET quarantined_at = {time}")
    assert f"{time} µs" in admin.get(LIST).content.decode()
    assert f"{time} µs" in admin.get(f"{LIST}{ids()[0]}/change/").content.decode()


def test_the_admin_drops_events(admin: Client) -> None:
    first, *others = ids()
    act(admin, "delete_selected", [first], post="yes")
    assert ids() == others


def test_the_admin_replays_events_and_says_which_stay(admin: Client) -> None:
    handled, failing, _ = ids()
    with override_settings(FEEDAPI_QUARANTINE_HANDLER="tests.django.test_quarantine.Replay"):
        page = act(admin, "replay", [failing, handled])
    assert f"{failing} failed again with ZeroDivisionError" in page
    assert "1 replayed" in page
    assert handled not in ids()
    assert failing in ids()
    assert execute("default", "SELECT n FROM effects") == [(0,)]


@pytest.mark.parametrize(
    ("handler", "text"),
    [(None, "No handler is known"), ("tests.django.nowhere.handle", "No module named")],
)
def test_a_replay_without_a_handler_says_what_to_set(
    admin: Client, handler: str | None, text: str
) -> None:
    before = ids()
    with override_settings(FEEDAPI_QUARANTINE_HANDLER=handler):
        page = act(admin, "replay", before)
    assert text in page
    assert "FEEDAPI_QUARANTINE_HANDLER" in page
    assert ids() == before
    connections["default"].close()
