"""R7, R13, R18 and text: pages of broken or hostile publishers, as an application sees them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import FeedClient, FetchOptions, NoProgressError, ProtocolError, SyncFeedClient
from feedapi_client.testing import Publisher, Quirks, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import SAFETY_LIMIT, LocalFeed, consume
from tests.consumer.script import do, play

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def test_r07_with_a_selection_the_end_is_asked_with_that_selection() -> None:
    feed = LocalFeed(2, dialect="v2-draft", filters=["entity"], quirks=Quirks(last_cursor="always"))
    feed.numbers(0, *range(5))
    feed.close(1)
    chosen = FetchOptions(filters={"entity": "a"})
    async with feed.open(start="last", fetch=chosen) as reader:
        asked = [request for request in feed.requests if request.cursor == "_last"]
        assert sorted(request.partition or 0 for request in asked) == [0, 1]
        assert {request.query["filter-entity"] for request in asked} == {"a"}
        assert await feed.store.statuses() == {0: "open", 1: "drained"}
        feed.numbers(0, 7)
        assert await reader.take() == [7]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
async def test_r13_a_cycle_of_cursors_delivers_each_event_once_and_is_an_error(length: int) -> None:
    def cycle(_: Response, request: Request, publisher: Publisher) -> Response:
        here = 0 if request.cursor == "_first" else int(str(request.cursor))
        body = b'{"event":{"n":%d}}\n{"cursor":"%d"}\n' % (here, (here + 1) % length)
        return Response(200, body=body)

    feed, seen = LocalFeed(dialect="v2-draft"), []
    feed.fail(cycle, times=None)

    async def read_on() -> None:
        async for event in consumer:
            seen.append(event.json()["n"])  # noqa: PERF401 - what came before the error counts

    async with feed.consume() as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(NoProgressError):
            await read_on()
    assert seen == [*range(length)]
    assert feed.counters["fetch"] <= length + 6


def answers(cursor: str, payload: bytes = b'{"n":0}') -> faults.Fault:
    return faults.Replace(b'{"event":%b}\n{"cursor":"%b"}\n' % (payload, cursor.encode()))


@pytest.mark.parametrize("cursor", ["a\\u0000b", "x" * 20_000, "\\u001b[2J"])
async def test_r18_a_cursor_that_cannot_be_stored_is_never_committed_and_parks_its_partition(
    cursor: str,
) -> None:
    feed = LocalFeed(2, dialect="v2-draft")
    feed.numbers(1, 1, 2)
    feed.fail(answers(cursor), times=None, partition=0)
    async with feed.open(on_error="park") as reader:
        assert await reader.take(2) == [1, 2]
        await reader.until("parked")
        error = str(reader.consumer.status()[0].error)
    assert "the response holds a cursor that is" in error
    assert error.isprintable()
    assert len(error) < 400
    assert (await feed.store.cursors())[0] == "_first"


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("payload", [rb'{"n":1,"a":"\ud800"}', b'{"n":1,"a":"\xff"}'])
async def test_events_whose_text_is_not_unicode_are_delivered_as_sent_by_every_client(
    serve: Any, payload: bytes
) -> None:
    publisher = serve(1, dialect="v2-draft")

    def odd(_: Response, request: Request, publisher: Publisher) -> Response:
        event = b"" if request.cursor == "a" else b'{"event":%b}\n' % payload
        return Response(200, body=event + b'{"cursor":"a"}\n')

    publisher.fail(odd, times=None)
    async with consume(publisher, follow=False) as consumer:
        assert [event.raw async for event in consumer] == [payload]
    async with FeedClient(str(publisher.url)) as client:
        page = await client.fetch(0, "_first")
    with SyncFeedClient(str(publisher.url)) as sync_client:
        sync_page = await anyio.to_thread.run_sync(sync_client.fetch(0, "_first").read)
    assert [event.raw for event in (*page.events, *sync_page.events)] == [payload] * 2


async def test_r18_a_token_that_cannot_be_sent_is_refused() -> None:
    document = {"token": "t\x00", "partitions": [{"id": "0"}]}
    refused = ProtocolError, "token in the discovery is not printable ASCII"
    await play(
        do.fail(faults.Replace(document), on="discovery", times=None),
        do.raises(*refused, do.enter()),
    )


async def test_r09_a_discovery_that_lags_does_not_read_an_ancestor_again() -> None:
    old = {"partitions": [{"id": "0"}, {"id": "1", "cursorFromPartitions": ["0"]}]}
    superseded = {0: "superseded", 1: "superseded", 2: "open"}
    await play(
        *(do.begin_with(dialect="v2-draft"), do.numbers(0, *range(5)), do.reads(*range(5))),
        *(do.split(0, 1, method="cursor-from"), do.split(1, 1, method="cursor-from")),
        *(do.numbers(2, 5), do.reads(5)),
        *(do.fail(faults.Replace(old), on="discovery", times=1), do.numbers(2, 6), do.open()),
        *(do.takes(6), do.state(0, "superseded"), do.state(1, "superseded")),
        do.stored(superseded),
    )
