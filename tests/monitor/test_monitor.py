"""The monitor's endpoints, served beside a consumer and mounted in an application."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import feedapi_client.monitor.monitor_app
from feedapi_client import Batch, FeedConsumer, PartitionState, PartitionStatus, Quarantine
from feedapi_client.monitor import Monitor, serve
from feedapi_client.monitor.exposition import Exposition
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import SAFETY_LIMIT, consume, limits, numbers, wait_until
from tests.monitor.conftest import get

pytestmark = pytest.mark.anyio

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


async def handle_at_once(batch: Batch) -> None:
    """Do nothing."""


@asynccontextmanager
async def running(
    consumer: FeedConsumer, handle: Any = handle_at_once, **options: Any
) -> AsyncIterator[str]:
    """Run the consumer and its monitor for the block, and give the monitor's URL."""
    async with serve(consumer, port=0) as server, consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: consumer.run(handle, **options))
        yield server.url
        tasks.cancel_scope.cancel()


async def until(url: str, condition: Any) -> dict[str, Any]:
    """Ask for the status until the condition holds of the only consumer, and return that."""
    with anyio.fail_after(SAFETY_LIMIT):
        while True:
            consumers = (await get(url, "status")).json()["consumers"]
            if consumers and condition(consumers[0]):
                return dict(consumers[0])
            await anyio.sleep(0.02)


async def test_the_probes_follow_the_health_of_the_consumer(publisher: Publisher) -> None:
    consumer = consume(publisher)
    async with serve(consumer, port=0) as server:
        assert (await get(server.url, "healthz")).status_code == 200
        ready = await get(server.url, "readyz")
        assert ready.status_code == 503
        assert ready.json()["problems"][0]["name"] == "not-open"
    async with running(consumer) as url:
        await wait_until(lambda: consumer.health().ready)
        await until(url, lambda each: each["health"]["ready"])
        ready = await get(url, "readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        assert (await get(url, "healthz")).json()["live"] is True


async def test_the_status_has_every_partition_with_its_lineage(publisher: Publisher) -> None:
    end = numbers(publisher, 0, [1])
    first, second = publisher.split(0)
    async with running(consume(publisher, name="shop")) as url:
        found = await until(url, lambda each: each["states"].get("caught up") == 2)
    assert (found["name"], found["dialect"], found["feed"]) == ("shop", "v2-token", publisher.url)
    by_id = {each["id"]: each for each in found["partitions"]}
    assert (by_id[0]["state"], by_id[0]["cursor"], by_id[0]["closed"]) == ("drained", end, True)
    assert by_id[first]["starts_after"] == by_id[second]["starts_after"] == 0
    assert datetime.fromisoformat(by_id[0]["committed_at"]).tzinfo is not None
    assert "error" not in by_id[0]


async def test_the_metrics_name_feed_partition_and_process(publisher: Publisher) -> None:
    numbers(publisher, 0, [1, 2])
    async with running(consume(publisher)) as url:
        await until(url, lambda each: each["events"] == 2)
        plain = await get(url, "metrics")
        open_metrics = await get(
            url, "metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")
    assert "process_resident_memory_bytes " in plain.text
    assert 'messaging_destination_partition_id="0"' in plain.text
    # What the alert rules and the dashboard ask for.
    for name in (
        "feedapi_consumer_live",
        "feedapi_consumer_problems",
        "feedapi_consumer_caught_up_age_seconds",
        "feedapi_consumer_commit_duration_seconds_total",
        "messaging_client_operation_duration_seconds_bucket",
    ):
        assert f"\n{name}{{" in plain.text
    assert str(publisher.url) in plain.text


async def test_metrics_of_two_monitors_do_not_mix(
    publisher: Publisher, feedapi_publisher_factory: Any
) -> None:
    other = feedapi_publisher_factory()
    async with (
        running(consume(publisher)) as url,
        running(consume(other)) as other_url,
    ):
        await until(url, lambda each: each["health"]["ready"])
        await until(other_url, lambda each: each["health"]["ready"])
        assert str(other.url) not in (await get(url, "metrics")).text
        assert str(publisher.url) not in (await get(other_url, "metrics")).text


async def test_one_monitor_shows_several_consumers(
    publisher: Publisher, feedapi_publisher_factory: Any
) -> None:
    other = feedapi_publisher_factory(2)
    first, second = consume(publisher, name="a"), consume(other, name="b")
    async with serve(first, second, port=0) as server, first, second:
        status = (await get(server.url, "status")).json()
        metrics = (await get(server.url, "metrics")).text
    assert [each["name"] for each in status["consumers"]] == ["a", "b"]
    assert [len(each["partitions"]) for each in status["consumers"]] == [1, 2]
    assert str(publisher.url) in metrics
    assert str(other.url) in metrics


async def test_quarantined_events_are_listed_without_their_payload(publisher: Publisher) -> None:
    publisher.append(0, {"secret": "payload"})

    async def handle(batch: Batch) -> None:
        if batch.events:
            raise ValueError(batch.events[0].json()["secret"])

    async with running(consume(publisher), handle, on_failure=Quarantine()) as url:
        await until(url, lambda each: each["states"].get("caught up"))
    async with running(consume(publisher)) as url:
        await until(url, lambda each: each["quarantine"]["events"] == [])
    consumer = consume(publisher)
    async with running(consumer, handle, on_failure=Quarantine()) as url:
        await wait_until(lambda: consumer.status()[0].caught_up)
        async with serve(consumer, port=0) as fresh:
            text = (await get(fresh.url, "status")).text
            found = await until(fresh.url, lambda each: each["quarantine"]["events"])
    (event,) = found["quarantine"]["events"]
    assert (event["partition"], event["error_type"]) == (0, "ValueError")
    assert "payload" not in text


async def test_r19_no_secret_of_the_feed_is_shown(publisher: Publisher) -> None:
    url = str(publisher.url).replace("http://", "http://user:hunter2@") + "?token=hunter3"
    publisher.fail(faults.Status(503), on="fetch", times=None)
    consumer = FeedConsumer(url, limits=limits())
    async with running(consumer) as monitor:
        await until(monitor, lambda each: each["states"].get("retrying"))
        answers = [
            (await get(monitor, path)).text for path in ("status", "healthz", "readyz", "metrics")
        ]
    assert not [text for text in answers if "hunter" in text or "token=" in text]


@pytest.mark.parametrize("path", ["", "status", "healthz", "main.js", "metrics", "no/such/page"])
async def test_every_answer_has_the_headers_of_a_page_that_loads_nothing_from_elsewhere(
    publisher: Publisher, path: str
) -> None:
    async with serve(consume(publisher), port=0) as server:
        headers = (await get(server.url, path)).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(publisher: Publisher, method: str) -> None:
    async with serve(consume(publisher), port=0) as server:

        def ask() -> list[int]:
            paths = ("", "status", "healthz", "metrics")
            return [httpx.request(method, server.url + path).status_code for path in paths]

        assert await anyio.to_thread.run_sync(ask) == [405] * 4


async def test_it_can_be_mounted_in_an_application(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    consumer = consume(publisher)
    monitor = Monitor(consumer)
    application = Starlette(routes=[Mount("/feed", monitor)])
    transport = httpx.ASGITransport(application)
    async with consumer, httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        status = await client.get("/feed/status")
        assert status.json()["consumers"][0]["states"] == {"reading": 1}
        assert (await client.get("/feed/readyz")).status_code in (200, 503)
        assert (await client.get("/feed/metrics")).status_code == 200
        page = await client.get("/feed", follow_redirects=True)
        assert page.url.path == "/feed/"
        assert 'src="main.js"' in page.text
    monitor.close()


async def test_a_blocked_event_loop_is_found_and_named(publisher: Publisher) -> None:
    """Answered by another thread, so this one can be blocked."""
    consumer = consume(publisher, limit={"stall_timeout": 0.1})
    async with serve(consumer, port=0) as server, consumer:
        asking = ask_until_unhealthy(server.url)
        block_the_event_loop(asking)
        assert asking.stdout is not None
        answer = asking.stdout.read()
        assert answer.startswith("503 ")
        assert "event-loop-blocked" in answer
        assert "block_the_event_loop (test_monitor.py:" in answer
        asking.stdout.close()
        # And it recovers.
        status = (await get(server.url, "status")).json()
        assert status["blocked"] is None


def ask_until_unhealthy(url: str) -> subprocess.Popen[str]:
    program = (
        "import sys, urllib.request, urllib.error\n"
        "while True:\n"
        "    try:\n"
        "        urllib.request.urlopen(sys.argv[1] + 'healthz')\n"
        "    except urllib.error.HTTPError as error:\n"
        "        print(error.code, error.read().decode()); break\n"
    )
    command = [sys.executable, "-c", program, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def block_the_event_loop(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SAFETY_LIMIT
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_r20_a_native_cancellation_while_it_ends_leaves_no_task(publisher: Publisher) -> None:
    consumer, ending, before = consume(publisher), asyncio.Event(), asyncio.all_tasks()

    async def served() -> None:
        async with serve(consumer, port=0):
            ending.set()

    task = asyncio.create_task(served())
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert not consumer._listeners  # which metrics are counted by


async def test_a_port_that_is_taken_is_an_error_at_once(publisher: Publisher) -> None:
    consumer = consume(publisher)
    async with serve(consumer, port=0) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            await serve(consumer, port=port).__aenter__()


async def test_it_listens_on_the_loopback_interface_unless_told_otherwise(
    publisher: Publisher,
) -> None:
    async with serve(consume(publisher), port=0) as server:
        assert server.url.startswith("http://127.0.0.1:")
    async with serve(consume(publisher), host="0.0.0.0", port=0) as server:
        assert server.url.startswith("http://0.0.0.0:")


async def test_an_error_of_the_block_is_raised_as_it_is(publisher: Publisher) -> None:
    with pytest.raises(ZeroDivisionError):
        async with serve(consume(publisher), port=0):
            _ = 1 / 0


async def test_the_port_is_free_after_the_block(publisher: Publisher) -> None:
    async with serve(consume(publisher), port=0) as server:
        url = server.url
        await get(url, "status")
    with pytest.raises(httpx.ConnectError):
        await get(url, "status")


async def test_a_monitor_needs_a_consumer() -> None:
    with pytest.raises(TypeError):
        Monitor()
    with pytest.raises(TypeError):
        serve()


@pytest.mark.parametrize(
    ("host", "hosts", "status"),
    [
        ("127.0.0.1:9464", None, 200),
        ("localhost:9464", None, 200),
        ("LOCALHOST", None, 200),
        ("[::1]:9464", None, 200),
        ("evil.example", None, 421),
        ("evil.example:9464", None, 421),
        ("monitor.internal", ("monitor.internal",), 200),
        ("localhost", ("monitor.internal",), 421),
    ],
)
async def test_a_page_of_another_site_can_not_read_it_by_a_name_of_its_own(
    publisher: Publisher, host: str, hosts: tuple[str, ...] | None, status: int
) -> None:
    consumer = FeedConsumer(str(publisher.url))
    async with serve(consumer, port=0, hosts=hosts) as monitor, httpx.AsyncClient() as http:
        answer = await http.get(f"{monitor.url}status", headers={"host": host})
    assert answer.status_code == status
    assert answer.headers["cache-control"] == "no-store"


async def test_what_is_read_no_more_is_not_behind() -> None:
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    for state in PartitionState:
        status = PartitionStatus(0, state, "c", caught_up_at=long_ago)
        ended = state.value in ("drained", "superseded", "vanished", "elsewhere")
        assert (status.behind_seconds is None) == ended, state


async def test_idle_connections_are_few_and_closed(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.monitor.serving._SILENT_SECONDS", 0.05)
    async with serve(consume(publisher), port=0) as server:
        port = int(server.url.rpartition(":")[2].strip("/"))
        streams = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(100)]
        with anyio.fail_after(SAFETY_LIMIT):
            for number, stream in enumerate(streams):
                if number % 2 and number < 50:  # which sends the beginning of a request
                    with suppress(anyio.BrokenResourceError):
                        await stream.send(b"GET /healthz HTTP/1.1\r\n")
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    while await stream.receive():
                        pass
                await stream.aclose()
        assert (await get(server.url, "healthz")).status_code == 200


async def test_silent_connections_do_not_keep_a_probe_out(publisher: Publisher) -> None:
    async with serve(consume(publisher), port=0) as server:
        port = int(server.url.rpartition(":")[2].strip("/"))
        streams = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(64)]
        for _ in range(3):
            streams.append(await anyio.connect_tcp("127.0.0.1", port))
            assert (await get(server.url, "healthz")).status_code == 200
        with anyio.fail_after(SAFETY_LIMIT):  # the oldest gave way
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await streams[0].receive()
        await streams[-1].send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await streams[-1].receive()).startswith(b"HTTP/1.1 200")
        for stream in streams:
            await stream.aclose()


async def test_a_connection_that_does_not_read_its_answers_is_closed(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.monitor.serving._SILENT_SECONDS", 0.05)
    async with serve(consume(publisher), port=0) as server:
        port = int(server.url.rpartition(":")[2].strip("/"))
        requests = b"GET /main.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            with anyio.fail_after(SAFETY_LIMIT), pytest.raises(anyio.BrokenResourceError):
                await stream.send(requests)


async def test_what_is_no_request_is_not_logged(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(consume(publisher), port=0) as server:
        port = int(server.url.rpartition(":")[2].strip("/"))
        upgrade = (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        for bytes, status in ((b"\x16\x03\n\n", b"HTTP/1.1 400"), (upgrade, b"HTTP/1.1 200")):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(bytes)
                assert (await stream.receive()).startswith(status)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("metrics", Exposition, "render"),
        ("status", feedapi_client.monitor.monitor_app, "status_json"),
    ],
)
async def test_what_costs_much_is_rendered_at_most_twice_a_second(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, path: str, module: Any, name: str
) -> None:
    rendered = 0
    render = getattr(module, name)

    def counted(*arguments: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return render(*arguments)

    monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr("feedapi_client.monitor.snapshots._MAX_AGE", SAFETY_LIMIT)
    async with serve(consume(publisher), port=0) as server:
        answers = [await get(server.url, path) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len({answer.content for answer in answers}) == rendered == 1


async def test_a_foreign_name_is_refused_at_every_address(publisher: Publisher) -> None:
    async with serve(consume(publisher), host="0.0.0.0", port=0) as server:
        port = server.url.rpartition(":")[2].strip("/")
        url = f"http://127.0.0.1:{port}/healthz"
        async with httpx.AsyncClient() as client:
            for host, status in (
                ("rebound.example", 421),
                (f"rebound.example:{port}", 421),
                ("10.1.2.3", 200),
                ("localhost", 200),
                (socket.gethostname(), 200),
            ):
                assert (await client.get(url, headers={"Host": host})).status_code == status
