"""What a small compressed response may cost in memory, measured in a process of its own (R16)."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import subprocess
import sys
import zlib
from pathlib import Path

import anyio.to_thread
import pytest

from tests.client.wire import Reply, Request, ok, wire

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MOST = 120 * 1024 * 1024
"""Above what the process takes before: the limits below, and what the allocator keeps."""
READ = """
import anyio, json, resource, sys
from feedapi_client import FeedClient, FeedError, Limits, RetryPolicy, SyncFeedClient

url, kind = sys.argv[1:]
options = dict(
    retry=RetryPolicy(give_up_after=0),
    limits=Limits(max_discovery_bytes=8 << 20, max_line_bytes=8 << 20, max_buffered_bytes=8 << 20),
)

def use_sync():
    with SyncFeedClient(url, **options) as client:
        with client.open(client.discover(), 0, "_first") as response:
            for chunk in response:
                response.reader.feed(chunk)
                response.reader.check()

async def use_async():
    async with FeedClient(url, **options) as client:
        async with client.open(await client.discover(), 0, "_first") as response:
            async for chunk in response:
                response.reader.feed(chunk)
                response.reader.check()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
try:
    use_sync() if kind == "sync" else anyio.run(use_async)
    error = ""
except FeedError as caught:
    error = type(caught).__name__
print(json.dumps([error, peak() - before]))
"""


CODINGS = ("gzip", "gzip, gzip")
PLACES = ("discovery", "page", "error")


@functools.cache
def bomb_of(coding: str) -> bytes:
    """A body that inflates to 256 MiB of spaces."""
    compressor = zlib.compressobj(wbits=31)
    step = b" " * (1 << 20)
    body = b"".join(compressor.compress(step) for _ in range(256)) + compressor.flush()
    return gzip.compress(body) if "," in coding else body


@pytest.fixture
def anyio_backend() -> str:
    """That of the server only: the client is in a process of its own, on asyncio or synchronous."""
    return "asyncio"


DISCOVERY = b'{"token":"t","partitions":[{"id":"0"}]}'


def outcome(url: str, kind: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", READ, url, kind],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    error, grown = json.loads(done.stdout)
    return error, grown


@pytest.mark.parametrize(
    ("place", "coding", "kind"), [*itertools.product(PLACES, CODINGS, ("sync", "async"))]
)
async def test_r16_a_bomb_costs_no_more_than_the_limits(place: str, coding: str, kind: str) -> None:
    status = "503 Later" if place == "error" else "200 OK"
    bomb = ok(bomb_of(coding), f"Content-Encoding: {coding}", status=status)

    def reply_to(request: Request) -> Reply:
        return ok(DISCOVERY) if place != "discovery" and "/events" not in request.path else bomb

    async with wire(reply_to) as server:
        error, grown = await anyio.to_thread.run_sync(outcome, server.url, kind)
    expected = {"discovery": "NegotiationError", "page": "LineTooLongError"}
    if place == "error":
        assert error == "FeedUnavailableError"
    else:
        assert error == ("ProtocolError" if "," in coding else expected[place])
    assert grown < MOST
