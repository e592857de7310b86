"""Decompression bombs, as data, and a program that meets them.

A small response inflates to a quarter of a gigabyte.

``python -m tests.faults.bombs DRIVER URL OPERATION...`` runs one driver against the URLs and prints
a JSON line for each: the outcome, and by how many bytes the peak of the resident memory has grown.
"""

from __future__ import annotations

import itertools
import resource
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import anyio
import orjson

from feedapi_client import RetryPolicy
from tests.faults.drive import LIMITS, RETRY, Ended, call, call_sync, consume
from tests.faults.feed import OPERATIONS, Operation
from tests.faults.outcomes import Fault, Outcomes
from tests.faults.responses import whole

INFLATED = 256 * 1024 * 1024
MAX_GROWTH = 64 * 1024 * 1024
DRIVERS = ("consumer asyncio", "consumer trio", "client asyncio", "client trio", "sync client")
_PIECE = 1024 * 1024


def _gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


@cache
def _bomb(pattern: bytes, times: int = 1) -> bytes:
    """Return the pattern repeated up to `INFLATED` bytes, compressed so many times."""
    piece = pattern * (_PIECE // len(pattern))
    packed = b"".join(_gzipped(itertools.repeat(piece, INFLATED // len(piece))))
    for _ in range(times - 1):
        packed = b"".join(_gzipped([packed]))
    return packed


def _too_large(error: str) -> Outcomes:
    return Outcomes("NegotiationError", error, error, error, (3, 16))


_AMBIGUOUS = Outcomes("ProtocolError", "ProtocolError", "ProtocolError", "ProtocolError", (16,))
_UNAVAILABLE = Outcomes(
    "FeedUnavailableError",
    "FeedUnavailableError",
    "FeedUnavailableError",
    "FeedUnavailableError",
    (14, 16),
)
_EVENT = b'{"data":{"n":1}}\n'

BOMBS = (
    Fault(
        "bomb",
        "one line",
        lambda _: whole(_bomb(b"\0"), "Content-Encoding: gzip"),
        _too_large("LineTooLongError"),
    ),
    Fault(
        "bomb",
        "events without a checkpoint",
        lambda _: whole(_bomb(_EVENT), "Content-Encoding: gzip"),
        _too_large("BufferLimitError"),
    ),
    Fault(
        "bomb",
        "gzip in gzip",
        lambda _: whole(_bomb(b"\0", 2), "Content-Encoding: gzip, gzip"),
        _AMBIGUOUS,
    ),
    Fault(
        "bomb",
        "two headers of gzip",
        lambda _: whole(_bomb(b"\0", 2), "Content-Encoding: gzip", "Content-Encoding: gzip"),
        _AMBIGUOUS,
    ),
    Fault(
        "bomb",
        "the body of a 503",
        lambda _: whole(_bomb(b"\0"), "Content-Encoding: gzip", status="503 Busy"),
        _UNAVAILABLE,
    ),
)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _outcome(driver: str, url: str, operation: Operation) -> str:
    kind, _, backend = driver.partition(" ")
    if kind == "consumer":
        once = replace(RETRY, give_up_after=0.0)
        return anyio.run(_consume, url, operation, once, backend=backend).outcome
    if kind == "client":
        return anyio.run(call, url, operation, backend=backend).outcome
    return call_sync(url, operation).outcome


async def _consume(url: str, operation: Operation, retry: RetryPolicy) -> Ended:
    return await consume(url, operation, follow=False, retry=retry, limits=LIMITS)


def main(driver: str, *arguments: str) -> None:
    """Run the driver against a healthy feed first, then against the others."""
    healthy, *bombs = zip(arguments[::2], arguments[1::2], strict=True)
    _outcome(driver, healthy[0], "fetch")
    before = _peak()
    for url, name in bombs:
        operation = next(each for each in OPERATIONS if each == name)
        outcome = _outcome(driver, url, operation)
        print(orjson.dumps({"outcome": outcome, "growth": _peak() - before}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
