"""Discoveries that no publisher should send, as data: what is wrong, and the error on entry (R12).

A running consumer keeps its last good topology, whatever comes (`DELIVERED` in the matrix).
"""

from __future__ import annotations

from typing import Any

import orjson

from tests.faults.outcomes import DELIVERED

NEGOTIATION, PROTOCOL, LINEAGE = "NegotiationError", "ProtocolError", "LineageError"


def _partitions(*entries: Any, **more: Any) -> bytes:
    return orjson.dumps({"token": "t", "partitions": list(entries), **more})


def _with(**fields: Any) -> bytes:
    return _partitions({"id": "0"}, {"id": "1", **fields})


def _chain(*edges: tuple[int, int]) -> bytes:
    return _partitions(*({"id": id, "startsAfterPartition": parent} for id, parent in edges))


_DEEP = b"[" * 5000 + b"]" * 5000

DISCOVERIES: dict[str, tuple[bytes, str]] = {
    # No feed
    "an empty body": (b"", NEGOTIATION),
    "whitespace": (b" \r\n", NEGOTIATION),
    "null": (b"null", NEGOTIATION),
    "a number": (b"42", NEGOTIATION),
    "a string": (b'"partitions"', NEGOTIATION),
    "a list of partitions": (b'[{"id": "0"}]', NEGOTIATION),
    "an empty object": (b"{}", NEGOTIATION),
    "HTML": (b"<html>maintenance</html>", NEGOTIATION),
    "JSON with a byte order mark": (b"\xef\xbb\xbf" + _partitions({"id": "0"}), DELIVERED),
    "UTF-16": (_partitions({"id": "0"}).decode().encode("utf-16"), NEGOTIATION),
    "bytes that are no UTF-8": (b'{"partitions": [], "x": "\xff"}', NEGOTIATION),
    "a truncated object": (_partitions({"id": "0"})[:-2], NEGOTIATION),
    "two objects": (_partitions({"id": "0"}) * 2, NEGOTIATION),
    "a lone surrogate": (b'{"token": "\\ud800", "partitions": []}', NEGOTIATION),
    "NaN": (b'{"partitions": [], "x": NaN}', NEGOTIATION),
    "5,000 nested lists": (b'{"partitions": ' + _DEEP + b"}", NEGOTIATION),
    "terminal escapes": (b"\x1b]0;owned\x07\x1b[2J", NEGOTIATION),
    "partitions an object": (b'{"partitions": {"0": {}}}', NEGOTIATION),
    # Ids
    "a partition that is a string": (_partitions("0"), LINEAGE),
    "a partition that is a list": (_partitions(["0"]), LINEAGE),
    "no id": (_partitions({}), LINEAGE),
    "id null": (_partitions({"id": None}), LINEAGE),
    "id empty": (_partitions({"id": ""}), LINEAGE),
    "id -1": (_partitions({"id": -1}), LINEAGE),
    "id '-1'": (_partitions({"id": "-1"}), LINEAGE),
    "id 32768": (_partitions({"id": "32768"}), LINEAGE),
    "id of 1,000 digits": (_partitions({"id": "9" * 1000}), LINEAGE),
    "id 1.5": (_partitions({"id": 1.5}), LINEAGE),
    "id true": (_partitions({"id": True}), LINEAGE),
    "id ' 1'": (_partitions({"id": " 1"}), LINEAGE),
    "id '1_0'": (_partitions({"id": "1_0"}), LINEAGE),
    "id in Arabic digits": (_partitions({"id": "\u0661"}), LINEAGE),
    "id a terminal escape": (_partitions({"id": "\x1b[2J"}), LINEAGE),
    "id an object": (_partitions({"id": {"id": "0"}}), LINEAGE),
    "an id twice": (_partitions({"id": "0"}, {"id": 0}), LINEAGE),
    # Lineage
    "a partition after itself": (_chain((1, 1)), LINEAGE),
    "a partition from itself": (_with(cursorFromPartitions=["1"]), LINEAGE),
    "a cycle of two": (_chain((1, 2), (2, 1)), LINEAGE),
    "a cycle of 1,000": (_chain(*((n, (n + 1) % 1000) for n in range(1000))), LINEAGE),
    "both split methods": (
        _with(startsAfterPartition="0", cursorFromPartitions=["0"]),
        LINEAGE,
    ),
    "both spellings, different": (
        _with(startsAfterPartition="0", startsAfterParent="2"),
        LINEAGE,
    ),
    "a parent out of range": (_with(startsAfterPartition=40_000), LINEAGE),
    "a parent that is a list": (_with(startsAfterPartition=["0"]), LINEAGE),
    "ancestors that are a string": (_with(cursorFromPartitions="0"), LINEAGE),
    "an ancestor that is null": (_with(cursorFromPartitions=["0", None]), LINEAGE),
    # Other fields
    "closed a string": (_with(closed="false"), PROTOCOL),
    "lastCursor a number": (_with(closed=True, lastCursor=7), PROTOCOL),
    "lastCursor with a NUL": (_with(closed=True, lastCursor="a\0b"), PROTOCOL),
    "lastCursor of 17,000 characters": (_with(closed=True, lastCursor="c" * 17_000), PROTOCOL),
    "lastCursor that is no ASCII": (_with(closed=True, lastCursor="é"), PROTOCOL),
    "token a number": (orjson.dumps({"token": 1, "partitions": []}), PROTOCOL),
    "token with a line break": (orjson.dumps({"token": "a\nb", "partitions": []}), PROTOCOL),
    "token of 17,000 characters": (
        orjson.dumps({"token": "t" * 17_000, "partitions": []}),
        PROTOCOL,
    ),
    "filters a string": (_partitions(filters="type"), PROTOCOL),
    "filters with a number": (_partitions(filters=["type", 1]), PROTOCOL),
    "stream a number": (_partitions(stream=1), PROTOCOL),
    "exactlyOnce a string": (_partitions(exactlyOnce="yes"), PROTOCOL),
}
