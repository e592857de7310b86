"""Feeds, positions and texts that the contracts save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from zlib import crc32

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FIRST, FeedKey, Position, Status

FEED = FeedKey("https://service.test/feed", "contract")
ALL_PARTITIONS = range(32_767)
MANY = range(2_500)
"""Some times what a store saves with one statement. Saving all partitions takes seconds."""

SPECIAL_TEXTS = {
    "empty": "",
    "special cursor": FIRST,
    "zero": "0",
    "null": "null",
    "spaces": "  a b\t ",
    "line ends": "a\nb\r\nc\n",
    "quotes": """it's "quoted" `back` \\ slash \\""",
    "sql": "'); DROP TABLE feedapi_cursors; --",
    "placeholders": "%s %(x)s ? :x $1 {x} @p",
    "json": '{"a": [1, "\\u0000", null]}',
    "separators": "a:b|c;d,e=f&g#h*i[j]k",
    "wide": "æøå ΑΒΓ 漢字 🎉 e\u0301 \u2028\u0085\ufeff",
    "all printable ASCII": "".join(map(chr, range(0x20, 0x7F))),
}

UNUSUAL_CURSORS = ("a\0b", "\ud800")
"""No publisher may send them, and some storages can't hold them."""


def refused_cursor(error: StoreError, partition: int, cursor: str) -> None:
    """Check the error for a cursor that a store can't keep."""
    assert not isinstance(error, FencedError), "no other consumer is to blame"
    assert error.partition == partition, "the error has to name the partition of the cursor"
    assert cursor not in str(error), "an error holds nothing that a publisher sent (R19)"


def following(before: Position | None, cursor: str, status: Status = "open") -> Position:
    """Return a position that replaces the one `before` it.

    As `Position.after` does, but cursor and status decide the step: tests can tell what comes next.
    """
    replaces = None if before is None else before.revision
    step = 1 + crc32(f"{status} {cursor}".encode(errors="surrogatepass")) % 2**20
    return Position(cursor, status, (replaces or 0) + step, replaces)


def opening(partitions: Iterable[int] = (0,), cursor: str = "c") -> dict[int, Position]:
    """Return the first positions of partitions."""
    return {partition: following(None, f"{cursor}{partition}") for partition in partitions}


def advanced(positions: Mapping[int, Position], cursor: str = "d") -> dict[int, Position]:
    """Return the positions that follow these."""
    return {
        partition: following(position, f"{cursor}{partition}")
        for partition, position in positions.items()
    }
