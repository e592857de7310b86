from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import anyio
import httpx
import pytest

from feedapi_client.testing import Publisher, faults
from tests.testing.served_feed import TIMEOUT, ServedFeed

MakeFeed = Callable[..., ServedFeed]
STREAM = {"partition": 0, "cursor": "_first", "stream": "y"}


@pytest.fixture
def quiet_server(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which uvicorn logs something.

    It logs requests that had to be cancelled: without a record each request ended with its
    connection.
    """
    caplog.set_level(logging.INFO, logger="uvicorn.error")
    yield
    assert caplog.get_records("call") == []


@pytest.mark.anyio
async def test_serves_an_async_client() -> None:
    publisher = Publisher()
    async with publisher.serve() as url, httpx.AsyncClient(verify=False, timeout=TIMEOUT) as http:
        assert publisher.url == url
        assert (await http.get(url)).json()["token"] == publisher.token
    assert publisher.url is None


def test_threads_and_sockets_are_gone_afterwards(http: httpx.Client) -> None:
    def threads() -> int:
        return sum(each.name.startswith("feedapi publisher") for each in threading.enumerate())

    for _ in range(5):
        with Publisher().serve() as url:
            assert http.get(url).status_code == 200
            assert threads() == 1
        assert threads() == 0
    http.close()
    gc.collect()  # an open socket would be a ResourceWarning, which is an error


# Idle connections are kept alive for ten minutes, longer than a test may take.
@pytest.mark.usefixtures("quiet_server")
def test_stopping_does_not_wait_for_idle_connections(http: httpx.Client) -> None:
    with Publisher().serve() as url:
        assert http.get(url).status_code == 200


@pytest.mark.usefixtures("quiet_server")
def test_stopping_does_not_wait_for_hanging_requests() -> None:
    publisher = Publisher()
    publisher.fail(faults.Hang(), on="any", times=None)
    ended: list[bool] = []

    def ask(url: str) -> None:
        with suppress(httpx.HTTPError):
            httpx.get(url, verify=False, timeout=None)
            return
        ended.append(True)

    with publisher.serve() as url:
        clients = [threading.Thread(target=ask, args=(url,)) for _ in range(3)]
        for client in clients:
            client.start()
        while publisher.in_flight < 3:
            time.sleep(0.002)
    for client in clients:
        client.join()
    assert ended == [True] * 3


@pytest.mark.anyio
@pytest.mark.usefixtures("quiet_server")
async def test_stopping_does_not_wait_for_held_responses() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)
    async with httpx.AsyncClient(verify=False, timeout=TIMEOUT) as http:
        async with publisher.serve() as url:
            request = http.build_request("GET", url, params=STREAM)
            response = await http.send(request, stream=True)
        with pytest.raises(httpx.HTTPError):
            await response.aread()
        await response.aclose()


@pytest.mark.anyio
async def test_a_client_that_leaves_frees_the_stream() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)
    async with publisher.serve() as url, httpx.AsyncClient(verify=False, timeout=TIMEOUT) as http:
        async with http.stream("GET", url, params=STREAM):
            await publisher.wait(lambda: publisher.in_flight == 1, timeout=TIMEOUT)
        await publisher.wait(lambda: publisher.in_flight == 0, timeout=TIMEOUT)


def test_the_port_can_be_chosen() -> None:
    publisher = Publisher()
    with publisher.serve() as first:
        port = httpx.URL(first).port
        assert port is not None
        with pytest.raises(OSError, match="in use"):
            Publisher().serve(port=port).start()
    with publisher.serve(port=port) as again:
        assert again == first


def test_one_publisher_can_be_served_on_two_ports(http: httpx.Client) -> None:
    publisher = Publisher()
    with publisher.serve() as first, publisher.serve() as second:
        assert http.get(first).json() == http.get(second).json()
        assert first != second


def test_events_appended_by_another_thread_are_served(make_feed: MakeFeed) -> None:
    feed = make_feed(page_size=50)

    def append() -> None:
        for n in range(2000):
            feed.publisher.append(0, {"n": n})

    thread = threading.Thread(target=append)
    thread.start()
    cursor, found = "_first", list[int]()
    while len(found) < 2000:
        events, cursor = feed.read(0, cursor)
        found += [event["n"] for event in events]
    thread.join()
    assert found == list(range(2000))


def test_a_client_that_does_not_read_is_not_sent_without_end(http: httpx.Client) -> None:
    publisher = Publisher(dialect="v2-draft", stream=True, page_size=100)
    publisher.extend(0, [{"pad": "x" * 1000}] * 50_000)
    with publisher.serve() as url, http.stream("GET", url, params=STREAM):
        sent = 0
        while not sent or sent != publisher.bytes_sent:
            sent = publisher.bytes_sent
            time.sleep(0.2)  # a server that is slower than this only weakens the test
    assert 0 < sent < 25_000_000


@pytest.mark.anyio
async def test_wait_returns_when_the_condition_holds() -> None:
    publisher = Publisher()
    async with anyio.create_task_group() as group:
        group.start_soon(publisher.wait, lambda: publisher.payloads(0))
        await anyio.wait_all_tasks_blocked()
        publisher.append(0, {"n": 1})
    with pytest.raises(TimeoutError):
        await publisher.wait(lambda: False, timeout=0.01)


def test_32768_partitions_are_served(make_feed: MakeFeed) -> None:
    feed = make_feed(32768)
    feed.publisher.append(32767, {"n": 1})
    assert len(feed.partitions) == 32768
    assert feed.read_all(32767) == [{"n": 1}]
