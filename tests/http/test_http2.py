"""Partitions that share one HTTP/2 connection of the caller's client."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from feedapi_client import Batch, FeedConsumer, FetchOptions
from tests.http.certificates import Certificate, self_signed
from tests.http.http2_feed import PARTITION_BYTES

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("http2"), "127.0.0.1")


@pytest.fixture(scope="module")
def url(certificate: Certificate) -> Iterator[str]:
    """A server of HTTP/2 in a process of its own. It gets a socket that listens already."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "hypercorn", "tests.http.http2_feed:app"),
                *("--bind", f"fd://{number}", "--log-level", "ERROR", "--workers", "0"),
                *("--certfile", certificate.path, "--keyfile", certificate.key),
            ],
            pass_fds=[number],
            cwd=Path(__file__).parents[2],
        )
        port = listening.getsockname()[1]
    try:
        yield f"https://127.0.0.1:{port}/feed"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_r14_small_pages_keep_a_slow_handler_from_delaying_others_over_http2(
    url: str, certificate: Certificate
) -> None:
    read: set[int] = set()
    others_are_read = anyio.Event()

    async def handle(batch: Batch) -> None:
        if batch.partition == 0:
            await others_are_read.wait()
            consumer.stop()
        elif int(batch.cursor) >= PARTITION_BYTES:
            read.add(batch.partition)
            if read == {1, 2, 3}:
                others_are_read.set()

    async with (
        httpx.AsyncClient(http1=False, http2=True, verify=certificate.client()) as http,
        FeedConsumer(url, http=http, fetch=FetchOptions(page_size_hint=5000)) as consumer,
    ):
        with anyio.fail_after(100):
            await consumer.run(handle)
    assert read == {1, 2, 3}
