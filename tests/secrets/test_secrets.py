"""R19: a run full of secrets, over all faults, shows none of them anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import orjson
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from feedapi_client import (
    FeedClient,
    FeedConsumer,
    FeedError,
    FetchOptions,
    NoProgressError,
    ProtocolError,
    RetryPolicy,
    SQLiteCursorStore,
    SyncFeedClient,
)
from feedapi_client.telemetry import observe
from tests.faults.drive import LIMITS, RETRY, SAFETY_LIMIT
from tests.faults.feed import FaultyFeed, Operation, Spoil, lines
from tests.faults.matrix import FAULTS
from tests.faults.responses import whole
from tests.faults.server import RawServer, Request, Script
from tests.secrets.capture import Shown, capture
from tests.secrets.echoes import (
    ECHOES,
    HEADER,
    HEADERS,
    PARAMETERS,
    PAYLOAD,
    STATUSES,
    echo,
    redirect,
    with_secrets,
)

pytestmark = pytest.mark.anyio

AT_ONCE = 16
_QUICK = ("text", "JSON")
VARIANTS = [
    *(
        pytest.param("asyncio", name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in ECHOES
    ),
    pytest.param("trio", "decoded", marks=pytest.mark.slow),
]
"""A backend, and a variant. What is redacted does not depend on the backend."""
OPERATIONS: tuple[Operation, ...] = ("entry", "running", "fetch", "last")
PAYLOAD_TEXT = f'"{PAYLOAD}☃"'.encode()
TRUST = httpx.create_ssl_context()
"""Of all clients: to load the certificates for each of them took most of the time."""
IMPATIENT = replace(RETRY, give_up_after=0.0, refused_for=0.05)


class SecretFeed(FaultyFeed):
    """A feed whose payloads are secrets, and that answers with what it was asked."""

    respond: Callable[[Request], Script] | None = None

    def reply(self, request: Request) -> Script:
        """Answer a request."""
        if self.respond is not None:
            respond = self.respond
            self.spoil = lambda _: respond(request)
        return super().reply(request)

    def _body(self, kind: str, request: Request) -> bytes:
        body = super()._body(kind, request)
        # A discovery has no payload; its content may be quoted.
        return body if kind == "discovery" else body.replace(b'"\xe2\x98\x83"', PAYLOAD_TEXT)


async def consume(url: str, operation: Operation, store: Path, shown: Shown) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    async with httpx.AsyncClient(
        headers=HEADERS, params=PARAMETERS, timeout=LIMITS.request_timeout, verify=TRUST
    ) as http:
        consumer = FeedConsumer(
            url,
            store=SQLiteCursorStore(store),
            start="last" if operation == "last" else "first",
            retry=IMPATIENT,
            limits=LIMITS,
            http=http,
            on_error="park" if operation == "fetch" else "raise",
        )
        shown.add("repr", repr(consumer))
        try:
            with anyio.move_on_after(SAFETY_LIMIT):
                async with consumer:
                    with observe(consumer, meters.get_meter("test")):
                        await _read(consumer, shown)
        except FeedError as error:
            shown.error("error", error)
        shown.add("status", f"{consumer.status()} {consumer.health()} {consumer!r}")
        shown.add("metrics", str(reader.get_metrics_data()))
    meters.shutdown()


async def _read(consumer: FeedConsumer, shown: Shown) -> None:
    with anyio.move_on_after(0.1):
        async for batch in consumer.batches():
            shown.add("batch", repr(batch.partition))
            await batch.commit()
    shown.add("status", f"{consumer.status()} {consumer!r}")
    shown.add("health", f"{[each.error for each in consumer.status().partitions.values()]}")


async def run_all(
    server: RawServer, cells: list[tuple[Operation, SecretFeed]], folder: Path
) -> Shown:
    limiter = anyio.CapacityLimiter(AT_ONCE)
    with capture() as shown:

        async def cell(number: int, operation: Operation, feed: SecretFeed) -> None:
            async with limiter:
                url = with_secrets(server.add(feed.reply).url)
                await consume(url, operation, folder / f"{number}.db", shown)

        async with anyio.create_task_group() as tasks:
            for number, (operation, feed) in enumerate(cells):
                tasks.start_soon(cell, number, operation, feed)
    _add_stores(shown, folder)
    assert any(where == "log httpcore.http11" for where, _ in shown.texts)
    assert any(where == "store" for where, _ in shown.texts)
    return shown


def _add_stores(shown: Shown, folder: Path) -> None:
    for store in folder.iterdir():
        with suppress(FileNotFoundError):  # SQLite removes files of its own when it closes
            shown.add("store", store.read_bytes().decode("latin-1"))


def _responding(operation: Operation, respond: Callable[[Request], Script]) -> SecretFeed:
    feed = SecretFeed(operation, whole, None)
    feed.respond = respond
    return feed


@pytest.mark.parametrize(("anyio_backend", "variant"), VARIANTS)
async def test_r19_no_echo_shows_a_secret(server: RawServer, tmp_path: Path, variant: str) -> None:
    say = ECHOES[variant]
    cells = [
        (operation, _responding(operation, _echo(status, say)))
        for operation in OPERATIONS
        for status in STATUSES
    ]
    shown = await run_all(server, cells, tmp_path)
    assert shown.leaks() == []


def _echo(status: int, say: Callable[[Request], str]) -> Callable[[Request], Script]:
    return lambda request: echo(request, status, say)


async def test_r19_no_redirect_shows_a_secret(server: RawServer, tmp_path: Path) -> None:
    cells = [(operation, _responding(operation, redirect)) for operation in OPERATIONS]
    shown = await run_all(server, cells, tmp_path)
    assert shown.leaks() == []


FIELDS: dict[str, dict[str, object]] = {
    "id": {"partitions": [{"id": HEADER}]},
    "long id": {"partitions": [{"id": "x" * 30 + HEADER}]},
    "startsAfterPartition": {"partitions": [{"id": "0", "startsAfterPartition": HEADER}]},
    "cursorFromPartitions": {"partitions": [{"id": "0", "cursorFromPartitions": [HEADER]}]},
    "lastCursor": {"partitions": [{"id": "0", "lastCursor": f"é{HEADER}"}]},
    "token": {"partitions": [], "token": f"{HEADER}é"},
    "filters": {"partitions": [], "filters": [HEADER]},
}
"""What a discovery says, with something that was sent."""


@pytest.mark.parametrize("field", FIELDS)
async def test_r19_no_field_of_a_discovery_shows_a_secret(server: RawServer, field: str) -> None:
    url = server.add(lambda _: whole(orjson.dumps(FIELDS[field]))).url
    select = FetchOptions(filters={"kind": "a"} if field == "filters" else {})
    with capture() as shown:
        async with (
            httpx.AsyncClient(headers=HEADERS, verify=TRUST) as http,
            FeedClient(url, http=http, fetch=select) as client,
        ):
            with pytest.raises(ProtocolError, match=r"\*\*\*") as caught:
                await client.discover()
            shown.error("error", caught.value)
    assert shown.leaks() == []


@pytest.mark.parametrize("last", [HEADER, "x" * 70 + HEADER], ids=["short", "cut"])
async def test_r19_no_last_cursor_shows_a_secret(server: RawServer, last: str) -> None:
    listed = [{"id": "0", "closed": True, "lastCursor": last}]
    discovery = orjson.dumps({"token": "t", "partitions": listed})
    url = server.add(
        lambda asked: whole(lines({"cursor": "c"}) if "events" in asked.path else discovery)
    ).url
    retry = RetryPolicy(base_delay=0.01, max_delay=0.02, give_up_after=0.0)
    with capture() as shown:
        async with httpx.AsyncClient(headers=HEADERS, verify=TRUST) as http:
            consumer = FeedConsumer(url, http=http, retry=retry)
            with pytest.raises(NoProgressError, match=r"\*\*\*") as caught:
                await _read_all(consumer)
        shown.error("error", caught.value)
    assert shown.leaks() == []


async def _read_all(consumer: FeedConsumer) -> None:
    async with consumer:
        async for batch in consumer.batches():
            await batch.commit()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_r19_no_fault_shows_a_secret(server: RawServer, tmp_path: Path) -> None:
    spoils: list[Spoil] = [fault.spoil for fault in FAULTS]
    operations: tuple[Operation, ...] = ("entry", "fetch")
    cells = [
        (operation, SecretFeed(operation, spoil, None))
        for operation in operations
        for spoil in spoils
    ]
    shown = await run_all(server, cells, tmp_path)
    assert shown.leaks() == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("variant", [*_QUICK, "at the cut of an excerpt"])
def test_r19_the_sync_client_shows_no_secret(
    server: RawServer, anyio_backend: str, variant: str
) -> None:
    operations: tuple[Operation, ...] = ("entry", "fetch")
    with capture() as shown:
        for operation in operations:
            for status in STATUSES:
                feed = _responding(operation, _echo(status, ECHOES[variant]))
                url = with_secrets(server.add(feed.reply).url)
                with (
                    httpx.Client(headers=HEADERS, params=PARAMETERS, verify=TRUST) as http,
                    SyncFeedClient(url, http=http, retry=IMPATIENT, limits=LIMITS) as client,
                ):
                    try:
                        client.fetch(0, "_first").read()
                    except FeedError as error:
                        shown.error("error", error)
                    shown.add("repr", repr(client))
    assert shown.leaks() == []
