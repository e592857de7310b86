"""How long other work waits while responses are nonsense.

``python -m tests.benchmarks.bench_hostile`` prints a table in Markdown, and writes it to
``tests/faults/held.md``, from which the documentation takes the longest times. A cell is the
longest time between two turns of a task (of a thread, beside `SyncFeedConsumer`), in milliseconds
of the process's CPU, so that other processes don't count.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from feedapi_client import (
    FeedConsumer,
    Limits,
    MemoryCursorStore,
    RetryPolicy,
    SyncFeedConsumer,
)
from tests.benchmarks.serving import serving

PAGE = Path(__file__).parents[1] / "faults" / "held.md"
MEGABYTES = 4
SECONDS = 0.3
"""Of CPU, for each cell of the table."""
MOST_SECONDS = 5.0
PARTITIONS = (1, 16, 64)
_SLEEP = 0.002
_EVENT: dict[str, bytes] = {
    "v1": b'{"data":{"id":"000000000000","note":"%b"}}\n' % (b"x" * 100),
    "v2-draft": b'{"event":{"id":"000000000000","note":"%b"}}\n' % (b"x" * 100),
    "v2-token": b'{"data":{"id":"000000000000","note":"%b"}}\n' % (b"x" * 100),
}
SHAPES: dict[str, bytes] = {
    "events": b"EVENT",
    "`{}`": b"{}\n",
    '`{"":0}`': b'{"":0}\n',
    '`{"\\u0000":0}`': b'{"\\u0000":0}\n',
    '`{"Data":{}}`': b'{"Data":{}}\n',
    "the cursor asked with": b'{"cursor":"_first"}\n',
    "blank lines": b"\n",
    "an event, then 20 `{}`": b"EVENT" + b"{}\n" * 20,
    "one line of escapes": b"\\u0041\\ud800",
    "one line of keys": b'"DATA":{},',
}


def _body(shape: str, dialect: str) -> bytes:
    piece = SHAPES[shape].replace(b"EVENT", _EVENT[dialect])
    size = MEGABYTES << 20
    if shape == "one line of escapes":
        return b'{"data":"\\ud800' + piece * (size // len(piece)) + b'"}\n'
    if shape == "one line of keys":
        return b"{" + piece * (size // len(piece)) + b'"DATA":{}}\n'
    return piece * (size // len(piece))


def _responses(dialect: str, partitions: int, body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Whether a request is this one, and the response to it."""
    token = b'"token":"t",' if dialect == "v2-token" else b""
    listed = b",".join(b'{"id":"%d"}' % id for id in range(partitions))
    packed = gzip.compress(body, 9)
    head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n"
    page = head % (b"200 OK", len(packed), b"content-encoding: gzip\r\n") + packed
    yield b"cursor", page
    found = b'{%b"partitions":[%b]}' % (token, listed)
    status = b"400 Bad Request" if dialect == "v1" else b"200 OK"
    yield b"", head % (status, len(found), b"") + found


def _serve(send: Connection) -> None:
    """Answer each connection's requests by their path: ``/shape/dialect/partitions``."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    send.send(listener.getsockname()[1])
    shapes, known = list(SHAPES), dict[str, list[tuple[bytes, bytes]]]()

    def answer(connection: socket.socket) -> None:
        received = b""
        try:
            while data := connection.recv(1 << 16):
                received += data
                while b"\r\n\r\n" in received:
                    head, _, received = received.partition(b"\r\n\r\n")
                    line = head.partition(b"\r\n")[0]
                    _, number, dialect, count = (
                        line.split()[1].decode().split("?")[0].split("/")[:4]
                    )
                    key = f"{number}/{dialect}/{count}"
                    if key not in known:
                        body = _body(shapes[int(number)], dialect)
                        known[key] = list(_responses(dialect, int(count), body))
                    connection.sendall(next(sent for part, sent in known[key] if part in line))
        except OSError:
            pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def _options(dialect: str, partitions: int) -> dict[str, Any]:
    return {
        "store": MemoryCursorStore(),
        "v1_partitions": partitions if dialect == "v1" else None,
        "limits": Limits(max_concurrent_fetches=64),
        "retry": RetryPolicy(base_delay=0.01, max_delay=0.05),
        "on_error": "park",
    }


def _end() -> tuple[float, float]:
    return time.process_time() + SECONDS, time.monotonic() + MOST_SECONDS


async def _loop_is_held(url: str, dialect: str, partitions: int) -> float:
    longest = 0.0

    async def heart() -> None:
        nonlocal longest
        while True:
            before = time.process_time()
            await asyncio.sleep(_SLEEP)
            longest = max(longest, time.process_time() - before)

    async def consume() -> None:
        async with FeedConsumer(url, **_options(dialect, partitions)) as consumer:
            async for _ in consumer:
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(heart()), asyncio.create_task(consume())]
    await asyncio.sleep(0.1)  # the discovery, and what is made at the first use
    longest = 0.0
    end, until = _end()
    while time.process_time() < end and time.monotonic() < until:  # noqa: ASYNC110 - CPU has no event
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return longest


def _threads_wait(url: str, dialect: str, partitions: int) -> float:
    longest = 0.0
    with SyncFeedConsumer(url, **_options(dialect, partitions)) as consumer:
        thread = threading.Thread(target=lambda: consumer.run(lambda _: None), daemon=True)
        thread.start()
        time.sleep(0.2)
        end, until = _end()
        while time.process_time() < end and time.monotonic() < until:
            before = time.process_time()
            time.sleep(_SLEEP)
            longest = max(longest, time.process_time() - before)
        consumer.stop()
        thread.join(10)
    return longest


def _table(port: int) -> Iterator[str]:
    yield "| lines of the response | dialect | face | 1 partition | 16 | 64 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for number, shape in enumerate(SHAPES):
        for dialect in _EVENT:
            for face in ("`FeedConsumer`", "`SyncFeedConsumer`"):
                found = []
                for count in PARTITIONS:
                    url = f"http://127.0.0.1:{port}/{number}/{dialect}/{count}"
                    if face == "`FeedConsumer`":
                        seconds = asyncio.run(_loop_is_held(url, dialect, count))
                    else:
                        seconds = _threads_wait(url, dialect, count)
                    found.append(f"{seconds * 1000:.0f}")
                yield f"| {shape} | {dialect} | {face} | {' | '.join(found)} |"


def main() -> None:
    logging.disable(logging.CRITICAL)
    rows = []
    with serving(_serve) as port:
        for row in _table(port):
            rows.append(row)
            print(row, flush=True)
    PAGE.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
