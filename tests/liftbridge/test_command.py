"""``feedapi relay``, most of it in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest

from feedapi_client.cli.app import app
from feedapi_client.liftbridge import StreamOptions
from feedapi_client.testing import Publisher, Quirks
from tests import warm
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually_is
from tests.liftbridge.ledgers import FORMATS, relayed
from tests.liftbridge.middle import Fault, Middle, grpc_middle

pytestmark = pytest.mark.anyio

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, str]:
    return "--store", str(tmp_path / "c.db")


@pytest.fixture
def relay(broker: Broker, feedapi_publisher: Publisher) -> Start:
    """Start a relay of the feed to the test's stream."""

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return process(feedapi_publisher, broker, *arguments, **environment)

    return start


def process(
    feed: Publisher,
    broker: Broker,
    *arguments: str,
    program: tuple[str, str] = ("-m", "feedapi_client.cli"),
    nats: str | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", *program, "relay", feed.url or ""]
    command += ["--stream", broker.name, *arguments]
    if "--nats-env" not in arguments:
        command += ["--nats", nats or broker.nats_url]
    return warm.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=SAFETY_NET))
    assert out == ""
    return process.returncode, errors


async def test_it_relays_to_the_end_and_continues_from_its_store(
    relay: Start, feedapi_publisher: Publisher, broker: Broker, store: tuple[str, str]
) -> None:
    await broker.create()
    for start in (0, 100):
        feedapi_publisher.extend(
            0, [{"customer": {"id": n % 5}, "n": n} for n in range(start, start + 100)]
        )
        assert await ended(relay(*store, "--key", "customer.id")) == (
            0,
            f"feedapi: 100 events in 1 batch to stream {broker.name}, 0 retries\n",
        )
    assert await broker.numbers() == list(range(200))
    keys = [message.key for message in await broker.messages()]
    assert keys == [b"%d" % (n % 5) for n in range(200)]


@pytest.mark.parametrize("format", FORMATS)
async def test_exactly_once_creates_its_stream_and_needs_no_store(
    relay: Start, feedapi_publisher: Publisher, broker: Broker, format: str
) -> None:
    arguments = ["--api", broker.address, "--create", "--exactly-once", format, "--quiet"]
    for start in (0, 100):
        feedapi_publisher.extend(0, [{"n": n} for n in range(start, start + 100)])
        assert await ended(relay(*arguments)) == (0, "")
    assert await relayed(broker) == list(range(200))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_after_the_batches_in_flight(
    relay: Start,
    feed: Publisher,
    broker: Broker,
    store: tuple[str, str],
    number: signal.Signals,
) -> None:
    await broker.create()
    process = relay(*store, "--follow")
    await eventually_is(broker.newest, lambda newest: newest == 19)
    process.send_signal(number)
    code, errors = await ended(process)
    assert (code, "20 events" in errors) == (128 + number, True), errors


async def test_a_monitor_is_served_beside_the_relay(
    relay: Start, feedapi_publisher: Publisher, broker: Broker, store: tuple[str, str]
) -> None:
    await broker.create()
    process = relay(*store, "--monitor", "127.0.0.1:0", "--follow")
    assert process.stderr is not None
    line = await anyio.to_thread.run_sync(process.stderr.readline)
    url = line.removeprefix("feedapi: monitor at ").strip()
    status = await anyio.to_thread.run_sync(lambda: httpx.get(f"{url}status"))
    assert status.json()["consumers"][0]["feed"] == feedapi_publisher.url
    process.send_signal(signal.SIGTERM)
    code, _ = await ended(process)
    assert code == 128 + signal.SIGTERM


async def test_a_broker_that_refuses_is_one_line_and_exit_code_one(
    feed: Publisher, broker: Broker, middle: Middle, store: tuple[str, str]
) -> None:
    await broker.create()
    middle.always = Fault.ENCRYPTION
    code, errors = await ended(process(feed, broker, *store, nats=middle.url))
    assert (code, errors.count("\n"), f"stream {broker.name}" in errors) == (1, 1, True), errors


async def test_a_missing_stream_is_named_where_the_api_is_given(
    feed: Publisher, broker: Broker, middle: Middle, store: tuple[str, str]
) -> None:
    arguments = (*store, "--api", broker.address)
    code, errors = await ended(process(feed, broker, *arguments, nats=middle.url))
    assert (code, f"stream {broker.name}: there is no such stream" in errors) == (1, True), errors
    assert middle.received == 0


async def test_credentials_come_from_the_environment(
    relay: Start, feedapi_publisher: Publisher, broker: Broker, store: tuple[str, str]
) -> None:
    await broker.create()
    feedapi_publisher.bearer = "sesame"
    feedapi_publisher.append(0, {"n": 1})
    arguments = [*store, "--auth-env", "FEED_AUTH", "--nats-env", "NATS"]
    secrets = {"FEED_AUTH": "Bearer sesame", "NATS": broker.nats_url}
    code, errors = await ended(relay(*arguments, **secrets))
    assert (code, await broker.numbers()) == (0, [1]), errors


async def test_r8_relay_takes_the_edges_that_a_feed_leaves_out(
    feedapi_publisher: Publisher, broker: Broker, store: tuple[str, str]
) -> None:
    await broker.create()
    feedapi_publisher.quirks = Quirks(omit_parent_zero=True)
    feedapi_publisher.append(0, {"n": 0})
    feedapi_publisher.split(0, into=(9,), method="starts-after")
    feedapi_publisher.append(9, {"n": 1})
    # The command has no option for how long it waits for the end of a partition: 10 seconds.
    program = (
        "from feedapi_client.options import Limits\n"
        "Limits.__init__.__kwdefaults__['settle_time'] = 0.3\n"
        "from feedapi_client.cli import main; main()"
    )
    arguments = [*store, "--lineage", "9:0"]
    run = process(feedapi_publisher, broker, *arguments, program=("-c", program))
    code, errors = await ended(run)
    assert (code, await broker.numbers()) == (0, [0, 1]), errors
    assert "closed and no partition starts after" not in errors


async def test_options_of_a_new_stream_reach_the_broker(
    relay: Start, broker: Broker, store: tuple[str, str]
) -> None:
    given = {
        "group": "g",
        "retention_bytes": "1000",
        "retention_messages": "7",
        "retention_seconds": "1.5",
        "cleaner_seconds": "2",
        "segment_bytes": "500",
        "segment_seconds": "0.5",
        "compact": "true",
        "compact_goroutines": "3",
        "auto_pause_seconds": "0",
        "auto_pause_unless_subscribed": "true",
        "encryption": "false",
    }
    assert given.keys() == {field.name for field in fields(StreamOptions)}
    options = [f"--stream-option={name}={value}" for name, value in given.items()]
    async with grpc_middle(broker.address) as middle:
        arguments = ["--api", middle.address, "--create", "--quiet", "--min-isr", "1"]
        assert await ended(relay(*arguments, *store, *options)) == (0, "")
    request = middle.created[broker.name]
    assert (request.group, request.minIsr.value) == ("g", 1)
    assert (request.retentionMaxBytes.value, request.retentionMaxMessages.value) == (1000, 7)
    assert (request.retentionMaxAge.value, request.cleanerInterval.value) == (1500, 2000)
    assert (request.segmentMaxBytes.value, request.segmentMaxAge.value) == (500, 500)
    assert (request.compactEnabled.value, request.compactMaxGoroutines.value) == (True, 3)
    assert request.autoPauseDisableIfSubscribers.value
    for field in ("autoPauseTime", "encryption"):
        assert request.HasField(field)
        assert not getattr(request, field).value


async def test_a_key_is_a_text_as_it_is_or_json(
    relay: Start, feedapi_publisher: Publisher, broker: Broker, store: tuple[str, str]
) -> None:
    await broker.create()
    for key in (True, None, {"a": [1]}, 1.5, "x"):
        feedapi_publisher.append(0, {"key": key})
    assert await ended(relay(*store, "--key", "key", "--quiet")) == (0, "")
    keys = [message.key for message in await broker.messages()]
    assert [key or b"" for key in keys] == [b"true", b"", b'{"a":[1]}', b"1.5", b"x"]


URL, STORE, API = "http://h/feed", ("--store", "f"), ("--api", "h:1")
ONCE = ("--exactly-once", "events")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([URL], "--store"),
        ([URL, *ONCE], "--api"),
        ([URL, *ONCE, *API, *STORE], "without --store"),
        ([URL, *STORE, "--create"], "--api"),
        ([URL, *STORE, "--filter", "x"], "NAME=VALUE"),
        ([URL, *STORE, "--auth-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        ([URL, "--exactly-once", "sometimes"], "batch"),
        ([URL, *STORE, "--api-tls"], "need --api"),
        ([URL, *STORE, *API, "--api-cert", "c"], "go together"),
        ([URL, *STORE, *API, "--api-ca", "/no/such/file"], "can't be read"),
        ([URL, *STORE, *API, "--api-token-env", "NAME"], "a token is a secret"),
        ([URL, *STORE, *API, "--api-tls", "--api-token-env", "NO_SUCH"], "NO_SUCH is not set"),
        ([URL, *API, *ONCE, "--stream-option", "compact=true"], "neither compacted"),
        ([URL, *STORE, "--stream-option", "replicas=1"], "there is no replicas; there are: group,"),
        ([URL, *STORE, "--stream-option", "compact=yes"], "got `str` - at `$.compact`"),
        (
            [URL, *API, *ONCE, "--stream-option", "retention_messages=50"],
            "retention_messages=50 is too little",
        ),
        (["ftp://h/feed", *STORE], "URL"),
        (["http://[::1/feed", *STORE], "URL"),
        (["http://me:hunter2@/feed", *STORE], "URL"),
        ([URL, *STORE, "--lineage", "1"], "--lineage"),
        ([URL, *STORE, "--lineage", "1:40000"], "40000"),
        ([URL, *STORE, "--partitions", "\x1b[2J"], "--partitions"),
        ([URL, *STORE, "--no-such-option"], "--no-such-option"),
    ],
)
def test_r19_a_wrong_command_line_is_one_line_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # In a thread: the one of the tests has a loop.
    with ThreadPoolExecutor(1) as pool, pytest.raises(SystemExit) as ended:
        pool.submit(app, ["relay", *arguments, "--stream", "s"]).result()
    errors = capsys.readouterr().err
    assert (ended.value.code, errors.startswith("feedapi: ")) == (2, True)
    assert errors.rstrip("\n").isprintable()
    assert says in errors
    assert "hunter2" not in errors
