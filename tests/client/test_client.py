"""`FeedClient` and `SyncFeedClient`."""

from __future__ import annotations

from collections.abc import Callable
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
    FeedUnavailableError,
    LineageError,
    LineTooLongError,
    NegotiationError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
)
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from tests.client.wire import DISCOVERY, Reply, Request, chunk, feed, ok, start, wire

pytestmark = pytest.mark.anyio

URL = "https://service/myfeed"
DRAFT = '{"partitions":[{"id":"0"}]}'
QUICK = RetryPolicy(base_delay=0.001, max_delay=0.001, max_retry_after=0.001)
PAGE = (
    b'{"data":{"n":1}}\n{"data":{"n":2}}\n{"cursor":"a"}\n'
    b'{"data":{"n":3}}\n{"cursor":"b"}\n{"data":{"n":4}}\n'
)


async def discover(**options: Any) -> FeedInfo:
    async with FeedClient(URL, retry=QUICK, **options) as client:
        return await client.discover()


def sync_discover(**options: Any) -> FeedInfo:
    with SyncFeedClient(URL, retry=QUICK, **options) as client:
        return client.discover()


async def both(sync: bool, **options: Any) -> FeedInfo:
    return sync_discover(**options) if sync else await discover(**options)


async def fetch(sync: bool, **options: Any) -> Page:
    if sync:
        with SyncFeedClient(URL, retry=QUICK, **options) as blocking:
            return blocking.fetch(1, "x").read()
    async with FeedClient(URL, retry=QUICK, **options) as client:
        return await client.fetch(1, "x")


@pytest.mark.parametrize("sync", [False, True])
class TestNegotiation:
    async def test_r01_discovery_has_no_arguments(self, httpx_mock: HTTPXMock, sync: bool) -> None:
        httpx_mock.add_response(url=URL, text=DRAFT)
        assert (await both(sync)).dialect == "v2-draft"

    async def test_r01_a_token_is_the_published_dialect(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, content=DISCOVERY)
        found = await both(sync)
        assert (found.dialect, found.token, sorted(found.partitions)) == ("v2-token", "t", [0, 1])

    @pytest.mark.parametrize("words", ["partition count mismatch", "Partition count doesn't match"])
    async def test_r01_a_wrong_v1_partitions_gives_the_publishers_words_first(
        self, httpx_mock: HTTPXMock, sync: bool, words: str
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=400, text="partition count missing")
        httpx_mock.add_response(
            url=httpx.URL(URL, params={"n": 4, "cursor1": "x"}), status_code=400, text=words
        )
        with pytest.raises(ProtocolError) as caught:
            await fetch(sync, v1_partitions=4)
        assert not isinstance(caught.value, RequestRefusedError)
        message = str(caught.value)
        assert 0 < message.index(words) < message.index("v1_partitions=4")
        assert "cursor" not in message

    async def test_r01_another_400_of_a_v1_feed_is_a_refusal(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=400, text="partition count missing")
        httpx_mock.add_response(
            url=httpx.URL(URL, params={"n": 4, "cursor1": "x"}), status_code=400, text="no cursor"
        )
        with pytest.raises(RequestRefusedError, match="no cursor"):
            await fetch(sync, v1_partitions=4)

    async def test_r01_400_is_v1_when_the_partitions_are_given(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(
            url=URL, status_code=400, text="handshake error: partition count missing"
        )
        found = await both(sync, v1_partitions=4)
        assert (found.dialect, sorted(found.partitions)) == ("v1", [0, 1, 2, 3])

    async def test_r01_400_is_an_error_when_they_are_not(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=400, text="handshake error")
        with pytest.raises(NegotiationError, match="give v1_partitions"):
            await both(sync)

    @pytest.mark.parametrize("status", [401, 403])
    async def test_r01_401_and_403_are_authentication_errors(
        self, httpx_mock: HTTPXMock, sync: bool, status: int
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=status)
        with pytest.raises(AuthenticationError, match=f"^feed {URL}: .*{status}"):
            await both(sync)

    @pytest.mark.parametrize("status", [408, 425, 429, 500, 503, 521])
    async def test_r01_temporary_failures_are_retried(
        self, httpx_mock: HTTPXMock, sync: bool, status: int
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=status, headers={"Retry-After": "3600"})
        httpx_mock.add_exception(httpx.ConnectError("refused"))
        httpx_mock.add_exception(httpx.ReadTimeout("slow"))
        httpx_mock.add_response(url=URL, text=DRAFT)
        assert (await both(sync)).dialect == "v2-draft"

    @pytest.mark.parametrize(
        ("status", "text"),
        [
            (404, "no such page"),
            (200, "<html>please log in</html>"),
            (200, '{"events":[]}'),
            (200, ""),
        ],
    )
    async def test_r01_any_other_response_is_an_error_that_quotes_it(
        self, httpx_mock: HTTPXMock, sync: bool, status: int, text: str
    ) -> None:
        httpx_mock.add_response(url=URL, status_code=status, text=text)
        with pytest.raises(NegotiationError) as caught:
            await both(sync, v1_partitions=2)
        assert f"status {status}" in str(caught.value)
        assert text in str(caught.value)

    async def test_r12_lineage_is_validated(self, httpx_mock: HTTPXMock, sync: bool) -> None:
        httpx_mock.add_response(
            url=URL, text='{"partitions":[{"id":"3","startsAfterPartition":"3"}]}'
        )
        with pytest.raises(LineageError, match="partition 3"):
            await both(sync)

    async def test_options_that_the_feed_can_not_carry_are_an_error(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, text=DRAFT)
        with pytest.raises(ProtocolError, match="does not offer filter 'subject'"):
            await both(sync, fetch=FetchOptions(filters={"subject": "a"}))

    async def test_the_callers_client_is_used_and_stays_open(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        httpx_mock.add_response(url=URL, text=DRAFT, match_headers={"authorization": "Bearer t"})
        kind = httpx.Client if sync else httpx.AsyncClient
        http = kind(headers={"authorization": "Bearer t"})
        await both(sync, http=http)
        assert not http.is_closed


class TestDiscovery:
    @pytest.mark.parametrize("kind", [FeedClient, SyncFeedClient])
    def test_an_invalid_number_of_v1_partitions_is_refused_at_once(
        self, kind: Callable[..., Any]
    ) -> None:
        with pytest.raises(ValueError, match="v1_partitions"):
            kind(URL, v1_partitions=0)

    async def test_r02_each_discovery_negotiates_again(self, httpx_mock: HTTPXMock) -> None:
        httpx_mock.add_response(url=URL, status_code=400)
        httpx_mock.add_response(url=URL, text=DRAFT)
        httpx_mock.add_response(url=URL, content=DISCOVERY)
        httpx_mock.add_response(url=URL, text=DRAFT)
        async with FeedClient(URL, v1_partitions=2) as client:
            assert [(await client.discover()).dialect for _ in range(4)] == [
                "v1",
                "v2-draft",
                "v2-token",
                "v2-draft",
            ]

    @pytest.mark.parametrize("sync", [False, True])
    async def test_a_discovery_that_says_the_same_is_not_read_again(
        self, httpx_mock: HTTPXMock, sync: bool
    ) -> None:
        wrong = b'{"token":"t","partitions":[{"id":"0","startsAfterPartition":"0"}]}'
        bodies = [DISCOVERY, DISCOVERY, wrong, wrong, DISCOVERY, DRAFT.encode(), DISCOVERY]
        for body in bodies:
            httpx_mock.add_response(url=URL, content=body)
        found: list[Any] = []
        client = SyncFeedClient(URL) if sync else FeedClient(URL)
        for _ in bodies:
            try:
                result = client.discover()
                found.append(result if isinstance(result, FeedInfo) else await result)
            except LineageError:
                found.append(None)
        first, second, *refused, third, draft, last = found
        assert first is not second
        assert first.partitions is second.partitions is third.partitions
        assert refused == [None, None]
        assert draft.dialect == "v2-draft"
        assert last == first
        assert last.partitions is not first.partitions
        assert client.info is last

    async def test_r12_the_last_good_discovery_is_kept(self, httpx_mock: HTTPXMock) -> None:
        httpx_mock.add_response(url=URL, text=DRAFT)
        httpx_mock.add_response(url=URL, text='{"partitions":[{"id":"x"}]}')
        async with FeedClient(URL) as client:
            good = await client.discover()
            with pytest.raises(LineageError):
                await client.discover()
            assert client.info is good

    async def test_r14_a_torn_discovery_is_retried(self) -> None:
        replies = [
            Reply(start(DISCOVERY[:10], length=100), close=True),
            Reply(start(DISCOVERY), close=True),
            ok(DISCOVERY),
        ]
        async with (
            wire(lambda _: replies.pop(0)) as server,
            FeedClient(server.url, retry=QUICK) as client,
        ):
            assert len((await client.discover()).partitions) == 2
        assert replies == []

    async def test_a_discovery_over_the_limit_is_an_error(self) -> None:
        async with (
            wire(lambda _: ok(DISCOVERY)) as server,
            FeedClient(server.url, limits=Limits(max_discovery_bytes=20)) as client,
        ):
            with pytest.raises(NegotiationError, match=r"raise Limits\.max_discovery_bytes"):
                await client.discover()

    async def test_r19_an_echoed_secret_is_not_quoted(self) -> None:
        async with (
            wire(lambda request: ok(f"<a href='{request.target}'>".encode())) as server,
            FeedClient(server.url + "?key=sesame") as client,
        ):
            with pytest.raises(NegotiationError) as caught:
                await client.discover()
        assert "sesame" not in str(caught.value)
        assert "***" in str(caught.value)

    @pytest.mark.parametrize("padding", [0, 180, 190, 197])
    async def test_r19_no_part_of_an_echoed_secret_is_quoted(self, padding: int) -> None:
        def reply_to(request: Request) -> Reply:
            text = b"x" * padding + request.target.encode()
            return ok(text) if "/events" in request.path else ok(DISCOVERY)

        async with (
            wire(reply_to) as server,
            FeedClient(server.url + "?key=sesame&other=1") as client,
        ):
            with pytest.raises(TornResponseError) as caught:
                await client.fetch(0, "_first")
        assert "ses" not in str(caught.value)

    async def test_its_repr_shows_the_dialect_and_the_partitions(
        self, httpx_mock: HTTPXMock
    ) -> None:
        httpx_mock.add_response(text=DRAFT)
        async with FeedClient(URL + "?key=sesame") as client:
            before = repr(client)
            await client.discover()
            assert (before, repr(client)) == (
                f"<FeedClient {URL}: not discovered yet>",
                f"<FeedClient {URL}: v2-draft, 1 partitions>",
            )


class TestFetch:
    async def test_a_fetch_discovers_first(self) -> None:
        async with wire(feed(PAGE)) as server, FeedClient(server.url) as client:
            await client.fetch(1, "_first")
            assert [request.target for request in server.requests] == [
                "/feed",
                "/feed/events?token=t&partition=1&cursor=_first",
            ]

    async def test_a_fetch_is_awaited_for_a_page(self) -> None:
        async with wire(feed(PAGE)) as server, FeedClient(server.url) as client:
            page = await client.fetch(1, "_first")
        assert (page.partition, page.asked, page.cursor, page.caught_up) == (
            1,
            "_first",
            "b",
            False,
        )
        assert [(event.partition, event.json()) for event in page.events] == [
            (1, {"n": 1}),
            (1, {"n": 2}),
            (1, {"n": 3}),
        ]

    async def test_r03_a_fetch_is_iterated_for_batches_as_checkpoints_arrive(self) -> None:
        body = start(PAGE[:51])
        async with (
            wire(feed(lambda _: Reply(body, hold=True))) as server,
            FeedClient(server.url) as client,
            client.fetch(1, "_first") as batches,
        ):
            with anyio.fail_after(60):
                batch = await anext(batches)
        assert (batch.partition, len(batch.events), batch.cursor) == (1, 2, "a")

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
        self, body: bytes, caught_up: bool
    ) -> None:
        async with wire(feed(body)) as server, FeedClient(server.url) as client:
            assert (await client.fetch(0, "x")).caught_up is caught_up

    async def test_a_batch_of_a_client_can_not_be_committed(self) -> None:
        async with wire(feed(PAGE)) as server, FeedClient(server.url) as client:
            batches = [batch async for batch in client.fetch(0, "_first")]
        with pytest.raises(CommitOrderError, match="without a consumer"):
            await batches[0].commit()

    async def test_a_fetch_is_read_once(self) -> None:
        async with wire(feed(PAGE)) as server, FeedClient(server.url) as client:
            fetch = client.fetch(0, "_first")
            await fetch
            with pytest.raises(RuntimeError, match="once"):
                await fetch

    async def test_a_fetch_is_not_retried(self) -> None:
        async with (
            wire(feed(lambda _: ok(b"", status="503 Later"))) as server,
            FeedClient(server.url, retry=QUICK) as client,
        ):
            with pytest.raises(FeedUnavailableError):
                await client.fetch(0, "_first")
            assert len(server.requests) == 2

    async def test_r10_a_refused_fetch_says_the_status(self) -> None:
        async with (
            wire(feed(lambda _: ok(b"token expired", status="409 Conflict"))) as server,
            FeedClient(server.url) as client,
        ):
            with pytest.raises(
                RequestRefusedError, match=r"partition 0: .*status 409: 'token expired'"
            ) as caught:
                await client.fetch(0, "_first")
            assert caught.value.status == 409

    @pytest.mark.parametrize(
        ("tail", "kind"),
        [
            (b"Internal server error\n", TornResponseError),
            (b'{"data":[1]}\n', ProtocolError),
            (b'{"data":"' + b"x" * 2000 + b'"}\n', LineTooLongError),
        ],
    )
    async def test_r03_checkpointed_events_come_before_the_error(
        self, tail: bytes, kind: type[Exception]
    ) -> None:
        async with (
            wire(feed(PAGE + tail)) as server,
            FeedClient(server.url, limits=Limits(max_line_bytes=1000)) as client,
        ):
            batches = client.fetch(0, "_first")
            assert (await anext(batches)).cursor == "b"
            with pytest.raises(kind):
                await anext(batches)

    async def test_r03_bytes_without_a_checkpoint_are_bounded(self) -> None:
        event = b'{"data":"' + b"x" * 500 + b'"}\n'
        body = start(PAGE) + b"".join(chunk(event) for _ in range(100))
        limits = Limits(max_line_bytes=1000, max_buffered_bytes=5000)
        async with (
            wire(feed(lambda _: Reply(body, hold=True))) as server,
            FeedClient(server.url, limits=limits) as client,
        ):
            with pytest.raises(
                BufferLimitError, match=r"Limits\.max_buffered_bytes is 5000\. Raise it"
            ):
                await client.fetch(0, "_first")

    async def test_r15_a_stream_is_asked_for_when_iterating(self, httpx_mock: HTTPXMock) -> None:
        httpx_mock.add_response(url=URL, text='{"partitions":[{"id":"0"}],"stream":true}')
        httpx_mock.add_response(url=URL + "?partition=0&cursor=a&stream=y", text='{"cursor":"a"}\n')
        httpx_mock.add_response(url=URL + "?partition=0&cursor=a", text='{"cursor":"a"}\n')
        async with FeedClient(URL, fetch=FetchOptions(stream=True)) as client:
            assert [batch.cursor async for batch in client.fetch(0, "a")] == ["a"]
            assert (await client.fetch(0, "a")).caught_up

    async def test_v1_is_fetched_one_partition_at_a_time(self, httpx_mock: HTTPXMock) -> None:
        httpx_mock.add_response(url=URL, status_code=400)
        httpx_mock.add_response(
            url=URL + "?n=3&cursor2=a&pagesizehint=7&headers=_all",
            text='{"partition":2,"headers":{"h":"1"},"data":"x"}\n{"partition":2,"cursor":"b"}\n',
        )
        async with FeedClient(
            URL, v1_partitions=3, fetch=FetchOptions(page_size_hint=7, v1_headers=["_all"])
        ) as client:
            page = await client.fetch(2, "a")
        assert ([(event.raw, event.headers) for event in page.events], page.cursor) == (
            [(b'"x"', {"h": "1"})],
            "b",
        )

    async def test_fetches_may_run_at_once(self) -> None:
        pages: dict[int, Page] = {}

        def reply_to(request: Request) -> Reply:
            return ok(b'{"data":{}}\n{"cursor":"%s"}' % request.query["partition"].encode())

        async with wire(feed(reply_to)) as server, FeedClient(server.url) as client:
            await client.discover()

            async def fetch(partition: int) -> None:
                pages[partition] = await client.fetch(partition, "_first")

            async with anyio.create_task_group() as tasks:
                for partition in range(20):
                    tasks.start_soon(fetch, partition)
        assert {partition: page.cursor for partition, page in pages.items()} == {
            number: str(number) for number in range(20)
        }

    async def test_leaving_a_fetch_early_ends_its_connection(self) -> None:
        async with (
            wire(feed(lambda _: Reply(start(PAGE), hold=True))) as server,
            FeedClient(server.url) as client,
        ):
            async with client.fetch(0, "_first") as batches:
                async for _ in batches:
                    break
            with anyio.fail_after(60):
                await server.closed.wait()

    @pytest.mark.parametrize("partition_cursor", ["+ & = % / ? #", "x" * 10_000])
    async def test_an_awkward_cursor_is_sent_and_received_unchanged(
        self, partition_cursor: str
    ) -> None:
        def page(request: Request) -> Reply:
            return ok(b'{"cursor":"%s"}\n' % request.query["cursor"].encode())

        async with wire(feed(page)) as server, FeedClient(server.url) as client:
            assert (await client.fetch(0, partition_cursor)).cursor == partition_cursor


class TestEndOf:
    async def test_r07_the_end_is_the_first_checkpoint_after_last(self) -> None:
        async with (
            wire(feed(b'{"cursor":"x"}\n{"data":{}}\n{"cursor":"y"}\n')) as server,
            FeedClient(server.url) as client,
        ):
            assert await client.end_of(1) == "x"
            assert server.requests[-1].query == {"token": "t", "partition": "1", "cursor": "_last"}

    async def test_r07_failures_are_retried_and_refusals_lead_to_a_discovery(self) -> None:
        replies = [
            ok(b"", status="503 Later"),
            ok(b"", status="409 Conflict"),
            ok(b""),
            Reply(start(b"{"), close=True),
            ok(b'{"cursor":"x"}'),
        ]
        async with (
            wire(feed(lambda _: replies.pop(0))) as server,
            FeedClient(server.url, retry=QUICK) as client,
        ):
            assert await client.end_of(0) == "x"
            assert [request.path for request in server.requests].count("/feed") == 2

    async def test_r13_a_publisher_without_a_cursor_is_an_error(self) -> None:
        async with (
            wire(feed(b'{"data":{}}\n')) as server,
            FeedClient(server.url, retry=QUICK) as client,
        ):
            with pytest.raises(
                NoProgressError,
                match=r"partition 1: the publisher answers a fetch from _last without a cursor",
            ):
                await client.end_of(1)
            assert len(server.requests) == 1 + Limits().max_attempts_without_progress

    async def test_r10_partitions_that_are_refused_together_share_a_discovery(self) -> None:
        def page(_: Request) -> Reply:
            outdated = [request.path for request in server.requests].count("/feed") < 2
            return ok(b"", status="409 Conflict") if outdated else ok(b'{"cursor":"x"}')

        async with wire(feed(page)) as server, FeedClient(server.url, retry=QUICK) as client:
            await client.discover()
            async with anyio.create_task_group() as tasks:
                for _ in range(32):
                    tasks.start_soon(client.end_of, 0)
            assert [request.path for request in server.requests].count("/feed") == 2

    async def test_r10_a_refusal_that_persists_is_raised(self) -> None:
        async with (
            wire(feed(lambda _: ok(b"", status="404 Gone"))) as server,
            FeedClient(server.url, retry=QUICK) as client,
        ):
            with pytest.raises(RequestRefusedError):
                await client.end_of(0)


class TestSyncFetch:
    """Over real sockets, in a thread."""

    async def run(
        self,
        reply_to: Callable[[Request], Reply],
        use: Callable[[SyncFeedClient], Any],
        **options: Any,
    ) -> Any:
        async with wire(reply_to) as server:

            def work() -> Any:
                with SyncFeedClient(server.url, retry=QUICK, **options) as client:
                    return use(client)

            return await anyio.to_thread.run_sync(work)

    async def test_it_is_read_for_a_page(self) -> None:
        page = await self.run(feed(PAGE), lambda client: client.fetch(1, "_first").read())
        assert ([event.json()["n"] for event in page.events], page.cursor) == ([1, 2, 3], "b")

    async def test_it_is_iterated_for_batches(self) -> None:
        batches = await self.run(
            feed(lambda _: Reply(start(PAGE[:51]) + chunk(PAGE[51:]) + b"0\r\n\r\n")),
            lambda client: list(client.fetch(1, "_first")),
        )
        assert batches[-1].cursor == "b"
        assert sum(len(batch) for batch in batches) == 3

    async def test_checkpointed_events_come_before_the_error(self) -> None:
        def use(client: SyncFeedClient) -> str:
            batches = client.fetch(0, "_first")
            first = next(batches)
            with pytest.raises(TornResponseError):
                next(batches)
            return first.cursor

        assert await self.run(feed(lambda _: Reply(start(PAGE), close=True)), use) == "b"

    async def test_it_can_be_left_early(self) -> None:
        def use(client: SyncFeedClient) -> str:
            with client.fetch(0, "_first") as batches:
                for batch in batches:
                    return batch.cursor
            return ""

        assert await self.run(feed(lambda _: Reply(start(PAGE), hold=True)), use) == "b"

    async def test_it_is_read_once(self) -> None:
        def use(client: SyncFeedClient) -> None:
            fetch = client.fetch(0, "_first")
            fetch.read()
            with pytest.raises(RuntimeError, match="once"):
                fetch.read()

        await self.run(feed(PAGE), use)

    async def test_an_open_response_gives_chunks_and_a_reader(self) -> None:
        def use(client: SyncFeedClient) -> list[str | None]:
            cursors = []
            with client.open(client.discover(), 0, "_first") as response:
                for piece in response.chunks():
                    response.reader.feed(piece)
                    cursors.append(response.reader.last_checkpoint)
            return cursors

        assert (await self.run(feed(PAGE), use))[-1] == "b"
