"""`FeedClient` and `SyncFeedClient`: the same tests for both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from pytest_httpx import HTTPXMock

from feedapi_client.client import FeedClient, Page, SyncFeedClient
from feedapi_client.errors import (
    AuthenticationError,
    BufferLimitError,
    CommitOrderError,
    FeedError,
    FeedUnavailableError,
    LineageError,
    LineTooLongError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
)
from feedapi_client.model import Batch, FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.page import PageReader
from tests.client.wire import DISCOVERY, Reply, Request, feed, ok, start, wire

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("sync", [False, True])]

URL = "https://service/myfeed"
DRAFT = '{"partitions":[{"id":"0"}]}'
QUICK = RetryPolicy(base_delay=0.001, max_delay=0.001, max_retry_after=0.001)
PAGE = (
    b'{"data":{"n":1}}\n{"data":{"n":2}}\n{"cursor":"a"}\n'
    b'{"data":{"n":3}}\n{"cursor":"b"}\n{"data":{"n":4}}\n'
)


class Client:
    """Either client. The one that blocks is called in a thread."""

    def __init__(self, url: str, sync: bool, **options: Any) -> None:
        self.sync = sync
        options = {"retry": QUICK, **options}
        self.client: Any = (SyncFeedClient if sync else FeedClient)(url, **options)

    async def _call(self, function: Any) -> Any:
        return await anyio.to_thread.run_sync(function) if self.sync else await function()

    async def discover(self) -> FeedInfo:
        found: FeedInfo = await self._call(self.client.discover)
        return found

    async def fetch(self, partition: int, cursor: str) -> Page:
        page: Page = await self._call(self.client.fetch(partition, cursor).read)
        return page

    async def batches(
        self, partition: int, cursor: str, first: int | None = None
    ) -> tuple[list[Batch], FeedError | None]:
        """The batches of a fetch, or the first few, and the error behind them."""
        found: list[Batch] = []
        fetch = self.client.fetch(partition, cursor)

        def blocking() -> None:
            with fetch as batches:
                for batch in batches:
                    found.append(batch)
                    if len(found) == first:
                        return

        async def suspending() -> None:
            async with fetch as batches:
                async for batch in batches:
                    found.append(batch)
                    if len(found) == first:
                        return

        try:
            await self._call(blocking if self.sync else suspending)
        except FeedError as error:
            return found, error
        return found, None


@asynccontextmanager
async def opened(url: str, sync: bool, **options: Any) -> AsyncIterator[Client]:
    with anyio.fail_after(60):
        client = Client(url, sync, **options)
        try:
            yield client
        finally:
            client.client.close() if sync else await client.client.aclose()


async def discover(sync: bool, **options: Any) -> FeedInfo:
    async with opened(URL, sync, **options) as client:
        return await client.discover()


class TestDiscovery:
    @pytest.mark.parametrize("status", [408, 425, 429, 500, 503, 521])
    async def test_r01_temporary_failures_are_retried(
        self, httpx_mock: HTTPXMock, sync: bool, status: int
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=status, headers={"Retry-After": "3600"})
        httpx_mock.add_exception(httpx.ConnectError("refused"))
        httpx_mock.add_exception(httpx.ReadTimeout("slow"))
        httpx_mock.add_response(url=URL, text=DRAFT)
        assert (await discover(sync)).dialect == "v2-draft"

    @pytest.mark.parametrize(
        ("status", "text", "kind"),
        [
            (401, "who", AuthenticationError),
            (404, "who", NegotiationError),
            (200, '{"partitions":[{"id":"3","startsAfterPartition":"3"}]}', LineageError),
        ],
    )
    async def test_r01_r12_any_other_answer_is_an_error(
        self, httpx_mock: HTTPXMock, sync: bool, status: int, text: str, kind: type[FeedError]
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=status, text=text)
        says = "partition 3" if status == 200 else f"status {status}: 'who'"
        with pytest.raises(kind, match=f"^feed {URL}.*{says}"):
            await discover(sync)

    async def test_options_that_the_feed_can_not_carry_are_an_error(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, text=DRAFT)
        with pytest.raises(ProtocolError, match="does not offer filter 'subject'"):
            await discover(sync, fetch=FetchOptions(filters={"subject": "a"}))

    async def test_an_invalid_number_of_v1_partitions_is_refused_at_once(self, sync: bool) -> None:
        with pytest.raises(ValueError, match="v1_partitions"):
            Client(URL, sync, v1_partitions=0)

    async def test_r02_each_discovery_negotiates_again(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=400)
        for text in (DRAFT, DISCOVERY.decode(), DRAFT):
            httpx_mock.add_response(url=URL, text=text)
        async with opened(URL, sync, v1_partitions=2) as client:
            found = [(await client.discover()).dialect for _ in range(4)]
        assert found == ["v1", "v2-draft", "v2-token", "v2-draft"]

    async def test_a_discovery_that_says_the_same_is_not_read_again(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        wrong = b'{"token":"t","partitions":[{"id":"0","startsAfterPartition":"0"}]}'
        bodies = [DISCOVERY, DISCOVERY, wrong, wrong, DISCOVERY, DRAFT.encode(), DISCOVERY]
        found: list[Any] = []
        async with opened(URL, sync) as client:
            for body in bodies:
                httpx_mock.add_response(url=URL, content=body)
                try:
                    found.append(await client.discover())
                except LineageError:
                    found.append(None)
                    assert client.client.info is found[1]  # the last good one is kept
            assert client.client.info is found[-1]
        first, second, *refused, third, draft, last = found
        assert first is not second
        assert first.partitions is second.partitions is third.partitions
        assert refused == [None, None]
        assert draft.dialect == "v2-draft"
        assert last == first
        assert last.partitions is not first.partitions

    async def test_r14_a_torn_discovery_is_retried(self, sync: bool) -> None:
        replies = [
            Reply(start(DISCOVERY[:10], length=100), close=True),
            Reply(start(DISCOVERY), close=True),
            ok(DISCOVERY),
        ]
        async with wire(lambda _: replies.pop(0)) as server, opened(server.url, sync) as client:
            assert len((await client.discover()).partitions) == 2
        assert replies == []

    @pytest.mark.parametrize("padding", [None, 0, 180, 190, 197])
    async def test_r19_no_part_of_an_echoed_secret_is_quoted(
        self, padding: int | None, sync: bool
    ) -> None:
        def reply_to(request: Request) -> Reply:
            text = b"x" * (padding or 0) + request.target.encode()
            return (
                ok(DISCOVERY) if padding is not None and "/events" not in request.path else ok(text)
            )

        async with (
            wire(reply_to) as server,
            opened(server.url + "?key=sesame&other=1", sync) as client,
        ):
            assert "sesame" not in repr(client.client)
            kind = NegotiationError if padding is None else TornResponseError
            with pytest.raises(kind) as caught:
                await client.fetch(0, "_first")
        assert "ses" not in str(caught.value)

    async def test_its_repr_shows_the_dialect_and_the_partitions(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(text=DRAFT)
        name = "SyncFeedClient" if sync else "FeedClient"
        async with opened(URL + "?key=sesame", sync) as client:
            assert repr(client.client) == f"<{name} {URL}: not discovered yet>"
            await client.discover()
            assert repr(client.client) == f"<{name} {URL}: v2-draft, 1 partitions>"


class TestFetch:
    async def test_a_fetch_discovers_first_and_is_read_for_a_page(self, sync: bool) -> None:
        async with wire(feed(PAGE)) as server, opened(server.url, sync) as client:
            page = await client.fetch(1, "_first")
        assert [request.target for request in server.requests] == [
            "/feed",
            "/feed/events?token=t&partition=1&cursor=_first",
        ]
        assert (page.partition, page.asked, page.cursor) == (1, "_first", "b")
        assert not page.caught_up
        events = [(event.partition, event.json()["n"]) for event in page.events]
        assert events == [(1, 1), (1, 2), (1, 3)]

    async def test_r03_a_fetch_is_iterated_for_batches_as_checkpoints_arrive(
        self, sync: bool
    ) -> None:
        """And left early."""
        page = feed(lambda _: Reply(start(PAGE[:51]), hold=True))
        async with wire(page) as server, opened(server.url, sync) as client:
            (batch,), error = await client.batches(1, "_first", first=1)
        assert (batch.partition, len(batch.events), batch.cursor) == (1, 2, "a")
        assert error is None

    @pytest.mark.parametrize(
        ("body", "caught_up"),
        [
            (b'{"cursor":"x"}\n', True),
            (b'{"cursor":"y"}\n', False),
            (b"", False),
            (b'{"data":{}}\n{"cursor":"x"}', False),
        ],
    )
    async def test_r06_a_page_says_whether_it_is_the_end(
        self, body: bytes, caught_up: bool, sync: bool
    ) -> None:
        async with wire(feed(body)) as server, opened(server.url, sync) as client:
            assert (await client.fetch(0, "x")).caught_up is caught_up

    async def test_a_batch_can_not_be_committed_and_a_fetch_is_read_once(self, sync: bool) -> None:
        async with wire(feed(PAGE)) as server, opened(server.url, sync) as client:
            batches, _ = await client.batches(0, "_first")
            with pytest.raises(CommitOrderError, match="without a consumer"):
                await batches[0].commit()
            fetch = client.client.fetch(0, "_first")
            await client._call(fetch.read)
            with pytest.raises(RuntimeError, match="once"):
                await client._call(fetch.read)

    @pytest.mark.parametrize(
        ("status", "kind"), [(409, RequestRefusedError), (503, FeedUnavailableError)]
    )
    async def test_r10_a_fetch_is_not_retried_and_says_the_status(
        self, status: int, kind: type[FeedError], sync: bool
    ) -> None:
        refused = feed(lambda _: ok(b"token expired", status=f"{status} No"))
        says = rf"partition 0: .*status {status}: 'token expired'"
        async with wire(refused) as server, opened(server.url, sync) as client:
            with pytest.raises(kind, match=says) as caught:
                await client.fetch(0, "_first")
            assert len(server.requests) == 2
        assert getattr(caught.value, "status", None) == status

    @pytest.mark.parametrize(
        ("words", "kind"),
        [
            ("partition count mismatch", ProtocolError),
            ("Partition count doesn't match", ProtocolError),
            ("no cursor", RequestRefusedError),
        ],
    )
    async def test_r01_a_wrong_v1_partitions_gives_the_publishers_words_first(
        self, httpx_mock: HTTPXMock, sync: bool, words: str, kind: type[FeedError]
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=400, text="partition count missing")
        url = httpx.URL(URL, params={"n": 4, "cursor1": "x"})
        httpx_mock.add_response(url=url, status_code=400, text=words)
        async with opened(URL, sync, v1_partitions=4) as client:
            with pytest.raises(FeedError) as caught:
                await client.fetch(1, "x")
        assert type(caught.value) is kind
        message = str(caught.value)
        if kind is ProtocolError:
            assert 0 < message.index(words) < message.index("v1_partitions=4")
            assert "cursor" not in message

    @pytest.mark.parametrize(
        ("tail", "kind"),
        [
            (b"Internal server error\n", TornResponseError),
            (b'{"data":[1]}\n', ProtocolError),
            (b'{"data":"' + b"x" * 2000 + b'"}\n', LineTooLongError),
            (b'{"data":"%b"}\n' % (b"x" * 500) * 20, BufferLimitError),
            (None, TornResponseError),
        ],
        ids=["text", "payload", "long", "unclosed", "torn"],
    )
    async def test_r03_checkpointed_events_come_before_the_error(
        self, tail: bytes | None, kind: type[Exception], sync: bool
    ) -> None:
        torn = Reply(start(PAGE), close=True)
        page = feed(lambda _: torn if tail is None else Reply(start(PAGE + tail), hold=True))
        limits = Limits(max_line_bytes=1000, max_buffered_bytes=5000)
        async with wire(page) as server, opened(server.url, sync, limits=limits) as client:
            batches, error = await client.batches(0, "_first")
            with pytest.raises(kind):
                await client.fetch(0, "_first")
        assert [batch.cursor for batch in batches] == ["b"]
        assert type(error) is kind

    async def test_r15_a_stream_is_asked_for_when_iterating(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, text='{"partitions":[{"id":"0"}],"stream":true}')
        httpx_mock.add_response(url=URL + "?partition=0&cursor=a&stream=y", text='{"cursor":"a"}\n')
        httpx_mock.add_response(url=URL + "?partition=0&cursor=a", text='{"cursor":"a"}\n')
        async with opened(URL, sync, fetch=FetchOptions(stream=True)) as client:
            batches, _ = await client.batches(0, "a")
            assert [batch.cursor for batch in batches] == ["a"]
            assert (await client.fetch(0, "a")).caught_up

    async def test_an_open_response_gives_chunks_and_a_reader(self, sync: bool) -> None:
        async with wire(feed(PAGE)) as server, opened(server.url, sync) as client:
            response = client.client.open(await client.discover(), 0, "_first")

            def blocking() -> None:
                with response:
                    for piece in response.chunks():
                        response.reader.feed(piece)

            async def suspending() -> None:
                async with response:
                    async for piece in response.chunks():
                        response.reader.feed(piece)

            await client._call(blocking if sync else suspending)
        assert response.reader.last_checkpoint == "b"


async def test_other_tasks_get_their_turn_within_a_chunk_of_lines(
    sync: bool, httpx_mock: HTTPXMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of nonsense is one chunk here, and takes long to decode. It is decoded in parts, and
    the event loop turns between two of them. The client that blocks has a thread of its own.
    """
    httpx_mock.add_response(text=DRAFT)
    httpx_mock.add_response(content=b"{}\n" * 100_000 + b'{"cursor":"a"}\n')
    client, feed = Client(URL, sync), PageReader.feed
    await client.discover()
    since, most, parts = 0, 0, 0

    def counted(reader: PageReader, part: bytes) -> Any:
        nonlocal since, most, parts
        since, parts = since + 1, parts + 1
        most = max(most, since)
        return feed(reader, part)

    async def turns() -> None:
        nonlocal since
        while True:
            since = 0
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(PageReader, "feed", counted)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns)
        page = await client.fetch(0, "_first")
        tasks.cancel_scope.cancel()
    assert page.cursor == "a"
    assert parts > 50
    assert sync or most <= 2
