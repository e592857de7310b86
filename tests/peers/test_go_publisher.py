"""The published Go library's publisher, and what a consumer makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import anyio
import httpx
import orjson
import pytest

from feedapi_client import (
    FIRST,
    LAST,
    FeedClient,
    FeedConsumer,
    FeedError,
    FeedUnavailableError,
    FetchOptions,
    LineageError,
    MemoryCursorStore,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.operations import FeedAccess, restore
from tests.cli.invoke import invoke
from tests.consumer.helpers import (
    RETRY,
    SHORT,
    by_entity,
    limits,
    n_of,
    read,
    take,
)
from tests.peers.go_publisher import Empty, GoPublisher

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Make = Callable[..., GoPublisher]
EVERY_EMPTY: list[Empty] = ["echo", "own", "silent"]


def consume(publisher: GoPublisher, **options: Any) -> FeedConsumer:
    assert publisher.url is not None
    settings: dict[str, Any] = {
        "limits": limits(settle_time=0.3, request_timeout=20.0),
        "retry": RETRY,
        **options,
    }
    return FeedConsumer(publisher.url, **settings)


def client_of(publisher: GoPublisher, **options: Any) -> FeedClient:
    assert publisher.url is not None
    return FeedClient(publisher.url, **options)


def fill(publisher: GoPublisher, numbers: range) -> None:
    for n in numbers:
        publisher.publish(f"e{n % 5}", {"entity": f"e{n % 5}", "n": n})


async def read_all(publisher: GoPublisher, **options: Any) -> list[Any]:
    """Read the feed to its end, without following."""
    async with consume(publisher, follow=False, **options) as consumer:
        return [event.json() for event in await read(consumer)]


def assert_all(payloads: list[Any], publisher: GoPublisher) -> None:
    """Everything came once, and each entity in order."""
    everything = by_entity(publisher.payloads())
    assert by_entity(payloads) == {key: sorted(numbers) for key, numbers in everything.items()}


# ---------------------------------------------------------------------------------- whole feeds


@pytest.mark.parametrize("empty", EVERY_EMPTY)
@pytest.mark.parametrize("checkpoint_every", [1, 7, 1000])
async def test_r03_a_feed_is_read_to_its_end(
    go_publisher: Make, empty: Empty, checkpoint_every: int
) -> None:
    publisher = go_publisher(3, empty=empty, checkpoint_every=checkpoint_every)
    fill(publisher, range(500))
    assert_all(await read_all(publisher), publisher)


@pytest.mark.parametrize("empty", EVERY_EMPTY)
async def test_r01_v1_is_read_to_its_end(go_publisher: Make, empty: Empty) -> None:
    publisher = go_publisher(3, dialect="v1", empty=empty)
    fill(publisher, range(500))
    assert_all(await read_all(publisher, v1_partitions=3), publisher)


async def test_r01_v1_without_its_number_of_partitions(go_publisher: Make) -> None:
    publisher = go_publisher(3, dialect="v1")
    with pytest.raises(NegotiationError, match="v1_partitions"):
        await read_all(publisher)
    with pytest.raises(ProtocolError, match="partition count mismatch"):
        await read_all(publisher, v1_partitions=2)


@pytest.mark.parametrize("empty", EVERY_EMPTY)
@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r06_r08_r09_splits_without_last_cursor(
    go_publisher: Make, empty: Empty, method: Any
) -> None:
    """Partition 0 is the parent that no edge names."""
    publisher = go_publisher(2, empty=empty)
    fill(publisher, range(200))
    publisher.split(0, (2, 3), method=method)
    fill(publisher, range(200, 400))
    publisher.split(3, (4, 5), method=method)
    fill(publisher, range(400, 600))
    assert_all(await read_all(publisher), publisher)


@pytest.mark.parametrize("empty", EVERY_EMPTY)
async def test_r02_r06_a_split_while_the_feed_is_followed(go_publisher: Make, empty: Empty) -> None:
    publisher = go_publisher(1, empty=empty)
    store, seen = MemoryCursorStore(), list[Any]()
    fill(publisher, range(50))
    async with consume(publisher, store=store) as consumer:
        events = aiter(consumer)
        seen += [event.json() for event in await take(events, 50)]
        publisher.split(0, (1, 2))
        fill(publisher, range(50, 100))
        seen += [event.json() for event in await take(events, 50)]
        publisher.split(1, (3, 4), method="cursor-from")
        fill(publisher, range(100, 150))
        seen += [event.json() for event in await take(events, 50)]
    assert_all(seen, publisher)


@pytest.mark.parametrize("empty", EVERY_EMPTY)
async def test_r11_a_split_is_rolled_back_and_made_again(go_publisher: Make, empty: Empty) -> None:
    publisher = go_publisher(1, empty=empty)
    store, seen = MemoryCursorStore(), list[Any]()
    fill(publisher, range(20))
    seen += await read_all(publisher, store=store)
    publisher.renumber(0, 10)
    fill(publisher, range(20, 40))
    seen += await read_all(publisher, store=store)
    publisher.renumber(10, 0)
    fill(publisher, range(40, 60))
    impatient = replace(RETRY, refused_for=0.1)
    with pytest.raises(LineageError, match="listed as open again"):
        await read_all(publisher, store=store, retry=impatient)

    await restore(store, FeedAccess(url=str(publisher.url)), [0])
    seen += await read_all(publisher, store=store)
    publisher.renumber(0, 10)
    fill(publisher, range(60, 80))
    seen += await read_all(publisher, store=store)
    assert_all(seen, publisher)
    assert [payload["n"] for payload in seen] == list(range(80))


@pytest.mark.parametrize("empty", EVERY_EMPTY)
async def test_r07_start_at_the_end(go_publisher: Make, empty: Empty) -> None:
    """Only a publisher that says where its end is can be read from there."""
    publisher = go_publisher(1, empty=empty)
    fill(publisher, range(30))
    quick = limits(request_timeout=20.0, max_attempts_without_progress=2)
    consumer = consume(publisher, start="last", limits=quick, retry=SHORT)
    if empty != "own":
        with pytest.raises(FeedError, match="cursors skip"):
            async with consumer:
                pass
        return
    async with consumer:
        fill(publisher, range(30, 60))
        assert n_of(await take(aiter(consumer), 30)) == list(range(30, 60))


async def test_r10_a_stale_token_is_waited_out(go_publisher: Make) -> None:
    """The library's handlers keep the token that they began with until they are made anew."""
    publisher = go_publisher(2)
    fill(publisher, range(20))
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        events = aiter(consumer)
        seen = [event.json() for event in await take(events, 20)]
        publisher.token = "t2"
        publisher.restart(stale=True)
        fill(publisher, range(20, 40))

        async def restart_later() -> None:
            await anyio.sleep(0.5)
            publisher.restart()

        tasks.start_soon(restart_later)
        seen += [event.json() for event in await take(events, 20)]
    assert_all(seen, publisher)


async def test_r03_an_error_text_within_a_response(go_publisher: Make) -> None:
    """What was checkpointed before counts. The rest is fetched again, and nothing is lost."""
    publisher = go_publisher(1, checkpoint_every=10)
    fill(publisher, range(80))
    publisher.tell(failBehind=25)
    async with consume(publisher) as consumer:
        seen = [event.json() for event in await take(aiter(consumer), 60)]
        assert [each["n"] for each in seen] == list(range(60))
    publisher.tell(failBehind=5)
    with pytest.raises(FeedError, match="Internal server error"):
        await read_all(publisher, retry=SHORT)
    publisher.tell(failBehind=0)
    assert_all(await read_all(publisher), publisher)


# ---------------------------------------------------------------------------------- one call each
# What the Go library's own client is tried with, by ours. 10,000 events in each of two partitions,
# half of each type.

COUNT = 10_000


def fixture(go_publisher: Make, **options: Any) -> GoPublisher:
    publisher = go_publisher(2, token="the-token", checkpoint_every=1, empty="silent", **options)
    for partition in (0, 1):
        publisher.extend(
            partition,
            (
                {
                    "ID": f"{partition}-{n}",
                    "Cursor": n,
                    "Type": "Captured" if n < COUNT // 2 else "Cancelled",
                }
                for n in range(COUNT)
            ),
        )
    return publisher


async def test_r01_discovery(go_publisher: Make) -> None:
    async with client_of(go_publisher(2)) as client:
        info = await client.discover()
    assert (info.dialect, info.token, sorted(info.partitions)) == ("v2-token", "t1", [0, 1])


async def test_r12_ids_that_no_partition_may_have(go_publisher: Make) -> None:
    """The library's own test has such ids, and sends them."""
    publisher = go_publisher(1)
    partitions = [
        {"id": "23423", "closed": True},
        {"id": "4543252", "startsAfterPartition": 23423},
    ]
    publisher.tell(info={"token": "t", "partitions": partitions}, restart=True)
    async with client_of(publisher) as client:
        with pytest.raises((ProtocolError, LineageError), match="4543252"):
            await client.discover()


async def test_r12_lineage_as_the_library_writes_it(go_publisher: Make) -> None:
    publisher = go_publisher(1)
    partitions = [
        {"id": "234", "closed": True},
        {"id": "454", "startsAfterPartition": 234},
        {"id": "832", "cursorFromPartitions": [23, 45]},
    ]
    publisher.tell(info={"token": "t", "partitions": partitions, "exactlyOnce": True}, restart=True)
    async with client_of(publisher) as client:
        info = await client.discover()
    assert info.partitions[234].closed
    assert info.partitions[454].starts_after == 234
    assert list(info.partitions[832].cursor_from) == [23, 45]


PAGES = [
    (None, "20000", 0),
    (None, FIRST, 100),
    (None, LAST, 0),
    (None, "9999", 1),
    (10_000, FIRST, 10_000),
    (10_000, "5000", 5000),
]


@pytest.mark.parametrize("dialect", ["v1", "v2-token"])
async def test_r03_pages(go_publisher: Make, dialect: str) -> None:
    publisher = fixture(go_publisher, dialect=dialect)
    for size, cursor, count in PAGES:
        async with client_of(
            publisher, v1_partitions=2, fetch=FetchOptions(page_size_hint=size)
        ) as client:
            page = await client.fetch(0, cursor)
        assert len(page.events) == count, (size, cursor)
        if count:
            first = 0 if cursor == FIRST else int(cursor)
            assert [e.json()["Cursor"] for e in page.events] == [*range(first, first + count)]
            assert page.cursor == str(first + count)


@pytest.mark.parametrize("dialect", ["v1", "v2-token"])
async def test_r10_a_cursor_that_is_none(go_publisher: Make, dialect: str) -> None:
    """The library answers status 500 with a text."""
    publisher = go_publisher(2, dialect=dialect)
    async with client_of(publisher, v1_partitions=2) as client:
        with pytest.raises(FeedUnavailableError, match="500: 'Internal server error"):
            await client.fetch(0, "qwerty")


async def test_r10_a_token_that_is_none(go_publisher: Make) -> None:
    publisher = go_publisher(2)
    async with client_of(publisher) as client:
        await client.discover()
        publisher.token = "another"
        publisher.restart()
        with pytest.raises(RequestRefusedError, match="illegal token") as refused:
            await client.fetch(0, FIRST)
        assert refused.value.status == 409
        await client.discover()
        assert (await client.fetch(0, FIRST)).events == []


async def test_event_types(go_publisher: Make) -> None:
    publisher = fixture(go_publisher)
    for types, count in [
        (("Captured",), 5000),
        (("Captured", "Cancelled"), 10_000),
        (("Unknown",), 0),
        ((), 10_000),
    ]:
        options = FetchOptions(event_types=types)
        async with consume(publisher, follow=False, partitions=[0], fetch=options) as consumer:
            assert len(await read(consumer)) == count, types


async def test_r03_what_is_on_the_wire(go_publisher: Make) -> None:
    """So that a change of the library shows here and not somewhere else."""
    publisher = go_publisher(2, checkpoint_every=1)
    publisher.extend(1, [{"n": 0}])
    assert publisher.url is not None
    async with httpx.AsyncClient() as http:
        discovery = await http.get(publisher.url)
        fetch = "/events?token=t1&partition=1&cursor=_first"
        page = await http.get(publisher.url + fetch)
        old = await http.get(publisher.url + "?n=2&cursor1=_first&pagesizehint=5")
    assert discovery.text == (
        '{"token":"t1","partitions":[{"id":"0"},{"id":"1"}],"exactlyOnce":false}\n'
    )
    assert page.text == '{"data":{"n":0}}\n{"cursor":"1"}\n'
    assert old.text == '{"data":{"n":0},"partition":1}\n{"cursor":"1","partition":1}\n'


# ---------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize("dialect", ["v1", "v2-token"])
@pytest.mark.parametrize(
    ("empty", "found"),
    [
        ("own", set()),
        ("echo", {"cursor-echo"}),
        ("silent", {"page-cursor", "last-cursor-given"}),
    ],
)
def test_doctor_finds_what_an_empty_page_lacks(
    empty: Empty, found: set[str], dialect: Literal["v1", "v2-token"]
) -> None:
    with GoPublisher(dialect=dialect, empty=empty) as url:
        counted = ["--v1-partitions", "2"] if dialect == "v1" else []
        report = orjson.loads(invoke(["doctor", url, "--json", *counted]).stdout)
    # The library answers a cursor that it does not know with 500.
    findings = {each["id"] for each in report["checks"] if each["findings"]}
    assert findings == found | {"refusal-status"}
