"""The publisher's cursors: opaque text for a consumer, a set of delivered events for the publisher.

Every event of a feed has a sequence number, counted over the whole feed. A cursor says: all events
below `base` were delivered, and of sub-log `s` all events below ``ahead[s]``. It also names the
partition that it was made for.

A partition that a split or a merge makes keeps the sequence numbers of the events that it
inherits. Therefore a cursor of an ancestor means the same point of the common history on its
successors, however the pages before it were interleaved.
"""

from __future__ import annotations

from typing import NamedTuple

_MASK = (1 << 64) - 1
# The factor is odd, hence invertible modulo 2**64. Words look random and decode exactly, and a
# made-up cursor decodes to numbers that are out of range.
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_XOR = 0x5EED_FEED_A710_C0DE
_SEQ_BITS = 48
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_NONCE = 0xFFFF
_WORD_LENGTH = 16

AWKWARD_PREFIX = 'a%2B+ /?&=#"\\:;,'
"""What `Quirks.awkward_cursors` puts before a cursor.

Its characters need percent-encoding in a URL, and escaping in JSON.
"""


class LogPosition(NamedTuple):
    """A place in the log of a partition: what a cursor stands for."""

    partition: int
    """The partition that the cursor was made for."""
    base: int
    """All events with lower sequence numbers were delivered."""
    ahead: dict[int, int]
    """By sub-log: all of its events with lower sequence numbers were delivered."""


def encode(position: LogPosition, *, nonce: int | None = None, awkward: bool = False) -> str:
    """Return the cursor of a position.

    Cursors with different nonces differ and stand for the same position. An `awkward` cursor
    begins with `AWKWARD_PREFIX`.
    """
    words = [_scramble(position.partition, position.base)]
    if position.ahead:
        words += [_scramble(sub_log, seq) for sub_log, seq in sorted(position.ahead.items())]
    if nonce is not None:
        words.append(_scramble(_NONCE, nonce))
    cursor = "".join(words)
    return AWKWARD_PREFIX + cursor if awkward else cursor


def decode(cursor: str) -> LogPosition:
    """Return the position of a cursor. Raises ValueError for text that can't be a cursor."""
    cursor = cursor.removeprefix(AWKWARD_PREFIX)
    if not cursor or len(cursor) % _WORD_LENGTH or not cursor.isascii():
        raise ValueError("not a cursor of this feed")
    words = [
        _unscramble(cursor[at : at + _WORD_LENGTH]) for at in range(0, len(cursor), _WORD_LENGTH)
    ]
    partition, base = words[0]
    return LogPosition(
        partition, base, {sub_log: seq for sub_log, seq in words[1:] if sub_log != _NONCE}
    )


def _scramble(high: int, low: int) -> str:
    return f"{((high << _SEQ_BITS | low) ^ _XOR) * _FACTOR & _MASK:016x}"


def _unscramble(word: str) -> tuple[int, int]:
    number = (int(word, 16) * _INVERSE & _MASK) ^ _XOR
    return number >> _SEQ_BITS, number & _SEQ_MASK
