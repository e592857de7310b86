"""R7, R13, R18 and text: pages of broken or hostile publishers, as an application sees them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from feedapi_client import (
    FeedClient,
    FetchOptions,
    NoProgressError,
    ProtocolError,
    SyncFeedClient,
)
from feedapi_client.testing import Publisher, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    consume,
    n_of,
    numbers,
    read_n,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio


async def test_r07_a_feed_that_answers_last_without_a_cursor_names_the_way_out(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.fail(faults.Replace(b""), times=None)
    consumer = consume(publisher, store=store, start="last")
    with pytest.raises(NoProgressError, match="'feedapi cursors skip'"):
        await consumer.__aenter__()
    assert store.saves == []


async def test_r07_with_a_selection_the_end_is_asked_with_that_selection(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, dialect="v2-draft", filters=["entity"])
    publisher.quirks = type(publisher.quirks)(last_cursor="always")
    numbers(publisher, 0, range(5))
    publisher.close(1)
    chosen = FetchOptions(filters={"entity": "a"})
    async with consume(publisher, store=store, start="last", fetch=chosen) as consumer:
        asked = [request for request in publisher.requests if request.cursor == "_last"]
        assert sorted(request.partition or 0 for request in asked) == [0, 1]
        assert {request.query["filter-entity"] for request in asked} == {"a"}
        assert (await store.statuses()) == {0: "open", 1: "drained"}
        numbers(publisher, 0, [7], entity="a")
        assert n_of(await take(aiter(consumer))) == [7]


@pytest.mark.parametrize("length", [1, 2, 3, 8])
async def test_r13_a_cycle_of_cursors_delivers_each_event_once_and_is_an_error(
    publisher: Publisher, length: int
) -> None:
    def cycle(response: Response, request: Request, publisher: Publisher) -> Response:
        here = 0 if request.cursor == "_first" else int(str(request.cursor))
        body = b'{"event":{"n":%d}}\n{"cursor":"%d"}\n' % (here, (here + 1) % length)
        return Response(200, body=body)

    publisher.dialect = "v2-draft"
    publisher.fail(cycle, times=None)
    seen: list[int] = []

    async def read_on() -> None:
        async for event in consumer:
            seen.append(event.json()["n"])  # noqa: PERF401 - what came before the error counts

    async with consume(publisher) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(NoProgressError):
            await read_on()
    assert seen == list(range(length))
    assert publisher.counters["fetch"] <= length + 6


@pytest.mark.parametrize("cursor", ["a\\u0000b", "x" * 20_000, "\\u001b[2J"])
async def test_r18_a_cursor_that_cannot_be_stored_is_never_committed_and_parks_only_its_partition(
    serve: Callable[..., Publisher], store: RecordingStore, cursor: str
) -> None:
    publisher = serve(2, dialect="v2-draft")
    numbers(publisher, 1, [1, 2])

    def hostile(response: Response, request: Request, publisher: Publisher) -> Response:
        return Response(200, body=b'{"event":{"n":0}}\n{"cursor":"%s"}\n' % cursor.encode())

    publisher.fail(hostile, times=None, partition=0)
    async with consume(publisher, store=store, on_error="park") as consumer:
        assert n_of(await take(aiter(consumer), 2)) == [1, 2]
        await wait_until(lambda: consumer.status()[0].state == "parked")
        error = str(consumer.status()[0].error)
    assert "the response holds a cursor that is" in error
    assert error.isprintable()
    assert len(error) < 400
    assert (await store.cursors())[0] == "_first"


@pytest.mark.parametrize("payload", [rb'{"n":1,"a":"\ud800"}', b'{"n":1,"a":"\xff"}'])
async def test_events_whose_text_is_not_unicode_are_delivered_as_sent_by_every_client(
    serve: Callable[..., Publisher], payload: bytes
) -> None:
    publisher = serve(1, dialect="v2-draft")

    def odd(response: Response, request: Request, publisher: Publisher) -> Response:
        if request.cursor == "a":
            return Response(200, body=b'{"cursor":"a"}\n')
        return Response(200, body=b'{"event":%b}\n{"cursor":"a"}\n' % payload)

    publisher.fail(odd, times=None)
    async with consume(publisher, follow=False) as consumer:
        assert [event.raw async for event in consumer] == [payload]
    async with FeedClient(str(publisher.url)) as client:
        page = await client.fetch(0, "_first")
    with SyncFeedClient(str(publisher.url)) as sync_client:
        sync_page = await anyio.to_thread.run_sync(sync_client.fetch(0, "_first").read)
    assert [event.raw for event in (*page.events, *sync_page.events)] == [payload] * 2


async def test_r18_a_token_that_cannot_be_sent_is_refused(publisher: Publisher) -> None:
    document = {"token": "t\x00", "partitions": [{"id": "0"}]}
    publisher.fail(faults.Replace(document), on="discovery", times=None)
    with pytest.raises(ProtocolError, match="token in the discovery is not printable ASCII"):
        await consume(publisher).__aenter__()


async def test_r09_a_discovery_that_lags_does_not_read_an_ancestor_again(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-draft", page_size=10)
    numbers(publisher, 0, range(5))
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))
    (middle,) = publisher.split(0, 1, method="cursor-from")
    (last,) = publisher.split(middle, 1, method="cursor-from")
    numbers(publisher, last, [5])
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [5]
    old = {"partitions": [{"id": "0"}, {"id": str(middle), "cursorFromPartitions": ["0"]}]}
    publisher.fail(faults.Replace(old), on="discovery", times=1)
    numbers(publisher, last, [6])
    async with consume(publisher, store=store) as consumer:
        assert n_of(await take(aiter(consumer))) == [6]
        found = {id: one.state for id, one in consumer.status().partitions.items()}
        assert (found[0], found[middle]) == ("superseded", "superseded")
    assert (await store.statuses()) == {0: "superseded", middle: "superseded", last: "open"}
