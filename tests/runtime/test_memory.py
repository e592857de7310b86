"""`BufferBudget`: room for received bytes, over all partitions (R16)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import orjson
import pytest

from feedapi_client.model import Event, make_event
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.runtime.partition import HEADERS_BYTES, memory_of

pytestmark = pytest.mark.anyio

READ = 64 * 1024
"""The bytes that a reservation sets aside."""


def test_r16_small_events_count_what_they_take_in_memory() -> None:
    small = CheckpointedEvents([Event() for _ in range(1000)], "c", 12_000)
    large = CheckpointedEvents([Event()], "c", 12_000)
    assert memory_of(small) >= 1000 * 130
    assert 12_000 < memory_of(large) < 13_000
    with_headers = CheckpointedEvents([make_event(0, b"{}", {"a": 1})], "c", 12_000)
    assert memory_of(with_headers) == memory_of(large) + HEADERS_BYTES
    assert memory_of(CheckpointedEvents([], "c", 16)) > 200, "a batch without events takes memory"


MEASURE = """
import asyncio, sys
from feedapi_client import FeedConsumer, Limits

LIMIT = 32 * 1024 * 1024

def rss():
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1]) * 4096

async def main():
    limits = Limits(max_buffered_bytes=LIMIT, max_batch_bytes=LIMIT)
    async with FeedConsumer(sys.argv[1], limits=limits) as consumer:
        before = rss()
        batches = consumer.batches()
        await anext(batches)
        held = -1
        while held < (now := consumer.status().buffered_bytes) or now < LIMIT // 2:
            held = max(held, now)
            await asyncio.sleep(0.2)  # the application handles the first batch
        print(consumer.status().buffered_bytes, rss() - before)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("payload", [b"{}", b'"%s"' % (b"x" * 300)], ids=["tiny", "usual"])
def test_r16_the_memory_of_the_process_stays_within_the_limit(payload: bytes) -> None:
    """Counted by their bytes on the wire, tiny events took eight times as much as allowed."""
    with serving_endless_pages(payload) as url:
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, url],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert run.returncode == 0, run.stderr
    buffered, grown = map(int, run.stdout.split())
    limit = 32 * 1024 * 1024
    assert limit // 2 <= buffered <= limit
    # The rest is what the interpreter, httpx and 16 connections take when they are first used.
    assert grown < limit * 1.5 + 16 * 1024 * 1024


@contextmanager
def serving_endless_pages(payload: bytes) -> Iterator[str]:
    """A feed of 16 partitions, whose pages hold 64 KiB of events."""
    line = b'{"data":' + payload + b"}\n"
    events = line * (65536 // len(line))
    found = {"token": "t", "partitions": [{"id": str(id)} for id in range(16)]}
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = orjson.dumps(found)
            if "cursor=" in self.path:
                body = events + b'{"cursor":"%d"}\n' % next(numbers)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Say nothing: at its end the other process resets its connections."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/feed"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
