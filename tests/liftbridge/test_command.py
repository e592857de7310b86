"""``feedapi relay``, most of it in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import orjson
import pytest

from feedapi_client.cli.app import app
from feedapi_client.liftbridge import LiftbridgeApi, RelayReader, StreamOptions
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests import warm
from tests.liftbridge.helpers import SAFETY_NET, eventually

pytestmark = pytest.mark.anyio

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def relay(nats_server: NatsServer, feedapi_publisher: Publisher) -> Start:
    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "feedapi_client.cli",
            "relay",
            feedapi_publisher.url or "",
            "--nats",
            nats_server.url,
            *arguments,
        ]
        return process(command, **environment)

    return start


def process(command: list[str], **environment: str) -> subprocess.Popen[str]:
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


def usage_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command writes in this process, which ends it with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        app(["relay", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def numbers(broker: LiftbridgeBroker) -> list[int]:
    return [orjson.loads(message.value)["n"] for message in broker.messages("s")]


async def test_it_relays_to_the_end_and_continues_from_its_store(
    relay: Start, feedapi_publisher: Publisher, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s")
    for start in (0, 100):
        feedapi_publisher.extend(
            0, [{"customer": {"id": n % 5}, "n": n} for n in range(start, start + 100)]
        )
        code, errors = await ended(
            relay(
                "--stream",
                "s",
                "--store",
                str(tmp_path / "c.db"),
                "--key",
                "customer.id",
            )
        )
        assert (code, errors) == (0, "feedapi: 100 events in 1 batch to stream s, 0 retries\n")
    assert numbers(broker) == list(range(200))
    assert [message.key for message in broker.messages("s")] == [
        b"%d" % (n % 5) for n in range(200)
    ]


@pytest.mark.parametrize("format", ["batch", "events"])
async def test_exactly_once_creates_its_stream_and_needs_no_store(
    relay: Start,
    feedapi_publisher: Publisher,
    api_broker: LiftbridgeBroker,
    api: LiftbridgeApi,
    format: str,
) -> None:
    arguments = [
        "--stream",
        "s",
        "--api",
        api_broker.address,
        "--create",
        "--exactly-once",
        format,
        "--quiet",
    ]
    for start in (0, 100):
        feedapi_publisher.extend(0, [{"n": n} for n in range(start, start + 100)])
        assert await ended(relay(*arguments)) == (0, "")
    reader = RelayReader(api, "s", until=api_broker.next_offset("s") - 1)
    assert [event.json()["n"] async for batch in reader for event in batch.events] == list(
        range(200)
    )


async def test_batches_that_do_not_fit_are_made_smaller_as_the_error_says(
    relay: Start,
    nats_server: NatsServer,
    feedapi_publisher_factory: Callable[..., Publisher],
    api_broker: LiftbridgeBroker,
    api: LiftbridgeApi,
) -> None:
    arguments = ["--nats", nats_server.url, "--api", api_broker.address]
    arguments += ["--exactly-once", "batch", "--quiet"]

    async def run(stream: str, page_size: int, *more: str) -> tuple[int, str]:
        await api_broker.create_stream(stream, concurrency_control=True, max_message_bytes=20_000)
        feed = feedapi_publisher_factory(1, page_size=page_size)
        feed.extend(0, [{"n": n, "x": "x" * 500} for n in range(100)])
        command = [sys.executable, "-m", "feedapi_client.cli", "relay", feed.url or ""]
        return await ended(process([*command, *arguments, "--stream", stream, *more]))

    code, errors = await run("large", 100)
    assert (code, "or --max-batch-bytes" in errors) == (1, True), errors
    assert await run("s", 10, "--max-batch-bytes", "10000") == (0, "")
    reader = RelayReader(api, "s", until=api_broker.next_offset("s") - 1)
    read = [event.json()["n"] async for batch in reader for event in batch.events]
    assert read == list(range(100))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_after_the_batches_in_flight(
    relay: Start,
    feedapi_publisher: Publisher,
    broker: LiftbridgeBroker,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, [{"n": n} for n in range(100)])
    process = relay("--stream", "s", "--store", str(tmp_path / "c.db"), "--follow")
    await eventually(lambda: len(broker.messages("s")) == 100)
    process.send_signal(number)
    code, errors = await ended(process)
    assert code == 128 + number
    assert "100 events" in errors


async def test_a_monitor_is_served_beside_the_relay(
    relay: Start, feedapi_publisher: Publisher, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s")
    store = str(tmp_path / "c.db")
    process = relay("--stream", "s", "--store", store, "--monitor", "127.0.0.1:0", "--follow")
    assert process.stderr is not None
    line = await anyio.to_thread.run_sync(process.stderr.readline)
    url = line.removeprefix("feedapi: monitor at ").strip()
    status = await anyio.to_thread.run_sync(lambda: httpx.get(f"{url}status"))
    assert status.json()["consumers"][0]["feed"] == feedapi_publisher.url
    process.send_signal(signal.SIGTERM)
    code, _ = await ended(process)
    assert code == 128 + signal.SIGTERM


async def test_a_broker_that_refuses_is_one_line_and_exit_code_one(
    relay: Start, feedapi_publisher: Publisher, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s", max_message_bytes=10)
    broker.always = BrokerFault.ENCRYPTION
    feedapi_publisher.append(0, {"n": 1})
    code, errors = await ended(relay("--stream", "s", "--store", str(tmp_path / "c.db")))
    assert code == 1
    assert errors.count("\n") == 1
    assert "stream s" in errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--store"),
        (["--exactly-once", "batch"], "--api"),
        (["--exactly-once", "batch", "--api", "x:1", "--store", "f"], "without --store"),
        (["--create", "--store", "f"], "--api"),
        (["--store", "f", "--filter", "x"], "NAME=VALUE"),
        (["--store", "f", "--auth-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--exactly-once", "sometimes"], "batch"),
    ],
)
def test_wrong_arguments_are_one_clear_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    errors = usage_error("http://h/feed", "--stream", "s", *arguments, capsys=capsys)
    assert says in errors.splitlines()[-1]
    assert "Traceback" not in errors


async def test_credentials_come_from_the_environment(
    relay: Start,
    feedapi_publisher: Publisher,
    nats_server: NatsServer,
    broker: LiftbridgeBroker,
    tmp_path: Path,
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.bearer = "sesame"
    feedapi_publisher.append(0, {"n": 1})
    arguments = [
        "--stream",
        "s",
        "--store",
        str(tmp_path / "c.db"),
        "--auth-env",
        "FEED_AUTH",
        "--nats-env",
        "NATS",
    ]
    code, errors = await ended(relay(*arguments, FEED_AUTH="Bearer sesame", NATS=nats_server.url))
    assert (code, numbers(broker)) == (0, [1]), errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["ftp://h/feed"],
        ["http://[::1/feed"],
        ["http://me:secret@/feed"],
        ["http://h/feed", "--lineage", "1"],
        ["http://h/feed", "--lineage", "1:40000"],
        ["http://h/feed", "--partitions", "\x1b[2J"],
        ["http://h/feed", "--no-such-option"],
    ],
)
def test_r19_a_wrong_command_line_is_one_line_with_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = str(tmp_path / "cursors.db")
    errors = usage_error(*arguments, "--stream", "s", "--store", store, capsys=capsys)
    assert errors.startswith("feedapi: ")
    assert errors.rstrip("\n").isprintable()
    assert "secret" not in errors


async def test_r8_relay_takes_the_edges_that_a_feed_leaves_out(
    feedapi_publisher: Publisher, nats_server: NatsServer, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.quirks = Quirks(omit_parent_zero=True)
    feedapi_publisher.append(0, {"n": 0})
    feedapi_publisher.split(0, into=(9,), method="starts-after")
    feedapi_publisher.append(9, {"n": 1})
    store = str(tmp_path / "cursors.db")
    # The command has no option for how long it waits for the end of a partition: 10 seconds.
    program = (
        "from feedapi_client.options import Limits\n"
        "Limits.__init__.__kwdefaults__['settle_time'] = 0.3\n"
        "from feedapi_client.cli import main; main()"
    )
    command = [sys.executable, "-W", "error", "-c", program, "relay", feedapi_publisher.url or ""]
    command += ["--nats", nats_server.url, "--stream", "s", "--store", store, "--lineage", "9:0"]
    code, errors = await ended(process(command))
    assert (code, numbers(broker)) == (0, [0, 1]), errors
    assert "closed and no partition starts after" not in errors


NEW_STREAM = {
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


async def test_options_of_a_new_stream_reach_the_broker(
    relay: Start, feedapi_publisher: Publisher, api_broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    assert NEW_STREAM.keys() == {field.name for field in fields(StreamOptions)}
    arguments = [f"--stream-option={name}={value}" for name, value in NEW_STREAM.items()]
    process = relay(
        *("--stream", "s", "--api", api_broker.address, "--create", "--quiet"),
        *("--min-isr", "1", "--store", str(tmp_path / "c.db"), *arguments),
    )
    assert await ended(process) == (0, "")
    request = api_broker.create_requests["s"]
    assert (request.group, request.minIsr.value) == ("g", 1)
    assert (request.retentionMaxBytes.value, request.retentionMaxMessages.value) == (1000, 7)
    assert (request.retentionMaxAge.value, request.cleanerInterval.value) == (1500, 2000)
    assert (request.segmentMaxBytes.value, request.segmentMaxAge.value) == (500, 500)
    assert (request.compactEnabled.value, request.compactMaxGoroutines.value) == (True, 3)
    assert request.autoPauseDisableIfSubscribers.value
    for field in ("autoPauseTime", "encryption"):
        assert request.HasField(field)
        assert not getattr(request, field).value


async def test_a_missing_stream_is_named_where_the_api_is_given(
    relay: Start, feedapi_publisher: Publisher, api_broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    process = relay(
        *("--stream", "s", "--api", api_broker.address, "--store", str(tmp_path / "c.db"))
    )
    code, errors = await ended(process)
    assert (code, "stream s: there is no such stream" in errors) == (1, True)
    assert api_broker.received == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-tls"], "need --api"),
        (["--api", "h:1", "--api-cert", "c"], "go together"),
        (["--api", "h:1", "--api-ca", "/no/such/file"], "can't be read"),
        (["--api", "h:1", "--api-token-env", "NAME"], "a token is a secret"),
        (["--api", "h:1", "--api-tls", "--api-token-env", "NO_SUCH"], "NO_SUCH is not set"),
        (
            ["--api", "h:1", "--exactly-once", "events", "--stream-option", "compact=true"],
            "without compact",
        ),
        (["--stream-option", "replicas=1"], "there is no replicas; there are: group,"),
        (["--stream-option", "compact=yes"], "compact takes bool, not 'yes'"),
        (
            [
                *("--api", "h:1", "--exactly-once", "events"),
                *("--stream-option", "retention_messages=50"),
            ],
            "retention_messages=50 is too little",
        ),
    ],
)
def test_options_of_the_api_that_do_not_fit_are_refused(
    nats_server: NatsServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    store = [] if "--exactly-once" in arguments else ["--store", str(tmp_path / "c.db")]
    more = ("--nats", nats_server.url, "--stream", "s", *store, *arguments)
    assert message in usage_error("http://h/feed", *more, capsys=capsys)


async def test_a_key_is_a_text_as_it_is_or_json(
    relay: Start, feedapi_publisher: Publisher, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s")
    for key in (True, None, {"a": [1]}, 1.5, "x"):
        feedapi_publisher.append(0, {"key": key})
    arguments = ["--stream", "s", "--store", str(tmp_path / "c.db"), "--key", "key", "--quiet"]
    assert await ended(relay(*arguments)) == (0, "")
    keys = [message.key for message in broker.messages("s")]
    assert [key or b"" for key in keys] == [b"true", b"", b'{"a":[1]}', b"1.5", b"x"]


async def test_a_key_that_no_event_has_is_said(
    relay: Start, feedapi_publisher: Publisher, broker: LiftbridgeBroker, tmp_path: Path
) -> None:
    await broker.create_stream("s")
    arguments = ["--stream", "s", "--store", str(tmp_path / "c.db"), "--key", "entty", "--quiet"]
    feedapi_publisher.extend(0, [{"entity": f"e{n}", "n": n} for n in range(1003)])
    code, errors = await ended(relay(*arguments))
    assert (code, errors.count("\n"), len(numbers(broker))) == (0, 1, 1003), errors
    assert "of 1,000 events none has the field entty of --key" in errors
    feedapi_publisher.append(0, {"n": 1003})
    code, errors = await ended(relay(*arguments))
    assert "of 1 event none has" in errors
    feedapi_publisher.append(0, {"n": 1004})
    feedapi_publisher.append(0, {"n": 1005, "entty": "e"})
    assert await ended(relay(*arguments)) == (0, "")
