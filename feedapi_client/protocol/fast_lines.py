"""Decode many lines of a response in one call.

This module only makes `PageDecoder` faster. What `BlockDecoder.decode` returns None for is decoded
line by line, with the same result. If it always did, only speed would be lost. (The result differs
for an event that gives its payload twice, of two kinds: there JSON itself leaves open what counts.)

Measured: nanoseconds of CPU an event, in 64 KiB chunks of 150-byte events with a checkpoint after
each 100 (CPython 3.11, msgspec 0.22, best of 40).

    ========================================  ====  ========  ========
    ..                                          v1  v2-draft  v2-token
    ========================================  ====  ========  ========
    line by line                               982       753       754
    one call, every line checked               424       391       392
    one call, events that begin alike          275       266       271
    one call, nothing checked (not correct)    235       221       220
    ========================================  ====  ========  ========
"""

from __future__ import annotations

import re
from functools import cache
from io import BytesIO
from operator import sub
from typing import NamedTuple, cast

import msgspec

from feedapi_client.model import Event, EventOrigin
from feedapi_client.protocol.cursors import are_valid
from feedapi_client.protocol.dialects import Dialect, V1Line

_NO_PAYLOAD = msgspec.Raw()
_OPEN, _CLOSE = b"{}"
_SMALL = 1024
"""Blocks of fewer bytes go line by line: at 300 bytes that takes 0.7 of the time, at 1,200 1.1."""
_MANY = 8
"""With fewer lines to a checkpoint every line is checked. Where each event has a checkpoint, that
takes 0.75 of the time that a look at each checkpoint and its neighbours takes."""
_LONGEST_KEY = 32
_BARE = len(b'{"cursor":"","data":""}')
"""The line of a checkpoint with fewer bytes beside its cursor can't hold an event too."""
_PERHAPS_EVENT = re.compile(rb'"(?:data|event)|\\u', re.IGNORECASE)


class Block(NamedTuple):
    """Complete lines, decoded: each of `lines` holds the one of `records` with the same index.

    A record is an event, or a checkpoint; `checkpoints` holds the indices of these, `cursors` what
    they say.
    """

    lines: list[bytes]
    records: list[Event]
    checkpoints: list[int]
    cursors: list[str]


@cache
def line_decoder(line: type[Event]) -> msgspec.json.Decoder[Event]:
    """Return the decoder of one line of a dialect."""
    return msgspec.json.Decoder(line)


class BlockDecoder:
    """Decodes the usual lines of one response, many at a time.

    msgspec decodes any number of records in a call, with any white space between them, and leaves a
    payload as it is. What it does not check is checked here: that each line holds one record, and
    that each record is either an event, whose payload is an object or a string, or a checkpoint.

    A publisher writes its events alike, so most lines begin with the same bytes, up to the first
    byte of the payload. If as many lines begin like that as there are events, only the checkpoints
    have to be looked at. One search through the block finds out.
    """

    __slots__ = ("_bare", "_dialect", "_heads", "_origin")

    def __init__(self, dialect: Dialect, origin: EventOrigin) -> None:
        # As little as possible: the responses of partitions at their ends are too small for it.
        self._dialect = dialect
        self._origin = origin
        self._heads: list[bytes] = []
        self._bare = _BARE + (
            len(f'"partition":{origin.partition},') if dialect.names_partition else 0
        )

    def decode(self, data: bytes, *, max_line_bytes: int) -> Block | None:
        """Decode complete lines. Return None when one of them may not be what it should be."""
        if len(data) < _SMALL:
            return None
        try:
            records = line_decoder(self._dialect.line).decode_lines(data)
        except (ValueError, RecursionError):
            return None
        lines = BytesIO(data).readlines()  # splits on b"\n" only
        if len(records) != len(lines):
            return None
        if len(data) > max_line_bytes and max(map(len, lines)) > max_line_bytes:
            return None
        origin = self._origin
        for record in records:  # two loops take 0.75 of the time of one that does both
            record._origin = origin
        checkpoints = [at for at, record in enumerate(records) if record._cursor is not None]
        cursors = [records[at]._cursor or "" for at in checkpoints]
        block = Block(lines, records, checkpoints, cursors)
        return block if self._fits(data, block) else None

    def names_partition(self, records: list[Event]) -> bool:
        """Return whether no record names another partition than this; only those of v1 name any."""
        if not self._dialect.names_partition:
            return True
        partition = self._origin.partition
        own: set[int | str | None] = {None, partition, str(partition)}
        return {line._line_partition for line in cast("list[V1Line]", records)} <= own

    def _fits(self, data: bytes, block: Block) -> bool:
        lines, records, checkpoints, cursors = block
        if not are_valid(cursors) or not self._are_bare([records[at] for at in checkpoints]):
            return False
        if checkpoints:
            found = [lines[at] for at in checkpoints]
            if max(map(sub, map(len, found), map(len, cursors))) > self._bare and any(
                map(may_hold_event, found, cursors)
            ):
                return False
        head = self._common_head(data, len(records) - len(checkpoints))
        if head and len(checkpoints) * _MANY < len(lines):
            return data.endswith(b"}\n") and _others_are(checkpoints, lines, head)
        return _each_is_an_object(lines) and (bool(head) or self._events_fit(records))

    def _are_bare(self, checkpoints: list[Event]) -> bool:
        for record in checkpoints:
            if record._payload != _NO_PAYLOAD:
                return False
        return self.names_partition(checkpoints)

    def _events_fit(self, records: list[Event]) -> bool:
        kinds = {bytes(record._payload)[:1] for record in records if record._cursor is None}
        return kinds <= {b"{", b'"'} and self.names_partition(records)

    def _common_head(self, data: bytes, events: int) -> bytes:
        """Return how all events begin, up to the first byte of the payload; empty if they differ.

        The head of a v1 line holds the partition.
        """
        heads = self._heads or self._learn(data)
        for index, head in enumerate(heads):
            if data.count(b"}\n" + head) + data.startswith(head) == events:
                self._heads = heads[index:]
                return head
        self._heads = []
        return b""

    def _learn(self, data: bytes) -> list[bytes]:
        """Return how the first or the second line begins, if that is an event.

        Tried first is the head with the payload's first key: a longer needle is found faster, which
        takes 5 % off the whole.
        """
        heads = self._dialect.heads(self._origin.partition)
        second = data.find(b"\n") + 1
        for start in (0, second):
            for head in heads:
                if data.startswith(head, start):
                    end = start + len(head)
                    key = data[end : data.find(b'":', end, end + _LONGEST_KEY) + 1]
                    return [head + key, head]
        return []


def may_hold_event(line: bytes, cursor: str) -> bool:
    """Return whether the line of a checkpoint may also hold an event, under whatever key (R3)."""
    return len(line) - len(cursor) > _BARE and _PERHAPS_EVENT.search(line) is not None


def _each_is_an_object(lines: list[bytes]) -> bool:
    """Return whether each line begins and ends as an object.

    Between ``}`` and ``{`` a newline can't be inside of a record. So if there are as many records
    as lines, each line holds one.
    """
    return {line[0] for line in lines} == {_OPEN} and {line[-2] for line in lines} == {_CLOSE}


def _others_are(checkpoints: list[int], lines: list[bytes], head: bytes) -> bool:
    """Return whether the lines that begin with `head` are just those without a checkpoint.

    `head` is known to begin as many lines as there are events, each behind the end of an object. So
    only the lines of checkpoints, and what is before them, can still be something else.
    """
    for at in checkpoints:
        line = lines[at]
        if line[0] != _OPEN or line[-2] != _CLOSE or line.startswith(head):
            return False
        if lines[at - 1][-2:] != b"}\n":
            return False
    return True
