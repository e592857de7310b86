from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from feedapi_client.testing import Publisher, Quirks, faults
from tests.testing.feed import Feed


@pytest.mark.anyio
async def test_serves_an_async_client() -> None:
    publisher = Publisher()
    async with publisher.serve() as url, httpx.AsyncClient(verify=False) as http:
        assert publisher.url == url
        assert (await http.get(url)).json()["token"] == publisher.token
    assert publisher.url is None


@pytest.mark.anyio
async def test_is_an_asgi_application() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)
    publisher.append(0, {"n": 1})
    publisher.fail(faults.Trickle(piece=5))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(publisher.asgi), base_url="http://feed"
    ) as http:
        assert (await http.get("/feed")).json() == publisher.discovery()
        trickled = await http.get("/feed", params={"partition": 0, "cursor": "_first"})
        streamed = await http.get(
            "/feed", params={"partition": 0, "cursor": "_first", "stream": "20"}
        )
    assert trickled.text == streamed.text


@pytest.mark.anyio
async def test_faults_of_the_connection_need_a_connection() -> None:
    publisher = Publisher()
    publisher.fail(faults.Reset(), on="any")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(publisher.asgi)) as http:
        with pytest.raises(BaseException) as raised:  # noqa: PT011 - a group on trio and asyncio alike
            await http.get("http://feed/feed")
    assert "Publisher.serve()" in str(
        raised.value.exceptions[0] if isinstance(raised.value, BaseExceptionGroup) else raised.value
    )


def test_threads_and_sockets_are_gone_afterwards() -> None:
    before = threading.active_count()
    for _ in range(5):
        with Publisher().serve() as url, httpx.Client(verify=False) as http:
            assert http.get(url).status_code == 200
    gc.collect()  # an open socket would be a ResourceWarning, which is an error
    assert threading.active_count() == before


def test_starts_and_stops_quickly() -> None:
    with Publisher().serve():
        pass
    started = time.monotonic()
    for _ in range(20):
        with Publisher().serve():
            pass
    assert (time.monotonic() - started) / 20 < 0.2


def test_stops_while_requests_hang() -> None:
    publisher = Publisher()
    publisher.fail(faults.Hang(), on="any", times=None)

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.get(publisher.url or "", verify=False, timeout=30)

    with publisher.serve():
        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        while publisher.in_flight < 3:
            time.sleep(0.002)
        started = time.monotonic()
    assert time.monotonic() - started < 1
    for client in clients:
        client.join()


def test_the_port_can_be_chosen() -> None:
    publisher = Publisher()
    with publisher.serve() as first:
        port = httpx.URL(first).port
        assert port is not None
        with pytest.raises(OSError, match="in use"):
            Publisher().serve(port=port).start()
    with publisher.serve(port=port) as again:
        assert again == first


def test_one_publisher_on_two_ports() -> None:
    publisher = Publisher()
    with publisher.serve() as one, publisher.serve() as two:
        assert httpx.get(one, verify=False).json() == httpx.get(two, verify=False).json()
        assert one != two


def test_a_serving_runs_once() -> None:
    serving = Publisher().serve()
    with serving, pytest.raises(RuntimeError, match=r"Publisher\.serve"):
        serving.start()
    serving.stop()


def test_requests_are_kept(feed: Callable[..., Feed]) -> None:
    one = feed(2)
    one.discover()
    one.fetch(1, "_last", pagesizehint=5)
    one.fetch(7)
    first, second, third = one.publisher.requests
    assert (first.kind, first.partition, first.status) == ("discovery", None, 200)
    assert (second.kind, second.partition, second.cursor, second.token) == (
        "fetch",
        1,
        "_last",
        one.publisher.token,
    )
    assert second.query["pagesizehint"] == "5"
    assert second.headers["host"] in one.url
    assert first.time <= second.time <= third.time
    assert (third.status, third.path) == (404, "/feed/events")
    assert one.publisher.counters == {
        "discovery": 1,
        "discovery 200": 1,
        "fetch": 2,
        "fetch 200": 1,
        "fetch 404": 1,
    }
    one.publisher.clear_requests()
    assert one.publisher.requests == []


def test_events_appended_by_another_thread_are_served(feed: Callable[..., Feed]) -> None:
    one = feed(page_size=50)

    def append() -> None:
        for n in range(2000):
            one.publisher.append(0, {"n": n})

    thread = threading.Thread(target=append)
    thread.start()
    cursor, found = "_first", list[int]()
    while len(found) < 2000:
        events, cursor = one.read(0, cursor)
        found += [event["n"] for event in events]
    thread.join()
    assert found == list(range(2000))


def test_repr_shows_the_state(feed: Callable[..., Feed]) -> None:
    publisher = feed(2).publisher
    publisher.append(1, {})
    publisher.close(1)
    assert (
        repr(publisher) == f"<Publisher v2-token {publisher.url} [0: 0 events, 1 closed: 1 events]>"
    )


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_serving_without_uvicorn_says_which_extra_it_needs() -> None:
    code = """
import sys
sys.modules["uvicorn"] = None
from feedapi_client.testing import Publisher
try:
    Publisher().serve()
except ImportError as error:
    print(error)
"""
    assert (
        run(code)
        == "serving a Publisher on a port needs uvicorn: pip install 'feedapi-client[testing]'"
    )


LOADED_BY = """
import sys, feedapi_client
before = set(sys.modules)
import {module}
print(sorted(name for name in set(sys.modules) - before if not name.startswith(("_", "feedapi_client")))[:20])
"""


def test_importing_the_package_needs_no_pytest_and_no_server() -> None:
    assert run(LOADED_BY.format(module="feedapi_client.testing")) == "[]"


def test_the_plugin_costs_nothing_before_use() -> None:
    code = LOADED_BY.replace("import sys, feedapi_client", "import sys, pytest, feedapi_client")
    assert run(code.format(module="feedapi_client.testing.pytest_plugin")) == "[]"


def test_the_fixture_is_a_served_publisher(feedapi_publisher: Publisher) -> None:
    assert feedapi_publisher.url is not None
    assert httpx.get(feedapi_publisher.url, verify=False).json()["partitions"] == [{"id": "0"}]


def test_the_factory_fixture_takes_what_a_publisher_takes(
    feedapi_publisher_factory: Callable[..., Publisher],
) -> None:
    one = feedapi_publisher_factory((3, 5), dialect="v2-draft", quirks=Quirks(integer_ids=True))
    two = feedapi_publisher_factory()
    assert one.url != two.url
    assert httpx.get(one.url or "", verify=False).json()["partitions"] == [{"id": 3}, {"id": 5}]


def test_public_names_exist() -> None:
    from feedapi_client import testing

    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        testing.nothing  # noqa: B018


def test_a_client_that_does_not_read_is_not_sent_without_end() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True, page_size=100)
    publisher.extend(0, [{"pad": "x" * 1000}] * 50_000)
    query = {"partition": 0, "cursor": "_first", "stream": "y"}
    with (
        publisher.serve() as url,
        httpx.Client(verify=False) as http,
        http.stream("GET", url, params=query),
    ):
        seen = 0
        while not seen or seen != publisher.bytes_sent:
            seen = publisher.bytes_sent
            time.sleep(0.2)
    assert 0 < seen < 25_000_000


@pytest.mark.parametrize("partitions", [(1, 1), (-1,), (32768,), 32769])
def test_ids_are_checked(partitions: object) -> None:
    with pytest.raises(ValueError, match="partition"):
        Publisher(partitions)  # type: ignore[arg-type]


def test_a_full_house_of_partitions(feed: Callable[..., Feed]) -> None:
    one = feed(32768)
    one.publisher.append(32767, {"n": 1})
    assert len(one.discover()["partitions"]) == 32768
    assert one.read_all(32767) == [{"n": 1}]
