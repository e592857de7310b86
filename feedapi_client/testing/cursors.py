"""The publisher's cursors: opaque to a consumer, a set of delivered events to the publisher.

Every event of a feed has a number, counted over the whole feed. A cursor says "all events below `base` were delivered, and of sub-log `s` all events
below ``ahead[s]``", plus the partition that it was made for. Because a partition made by a split or a merge keeps the numbers of the events that it
inherits, an ancestor's cursor means the same point of the common history on its heirs, however the pages before it were interleaved.
"""

from __future__ import annotations

from typing import NamedTuple

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64: looks random, decodes exactly, and a made-up cursor is out of range
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_TWIST = 0x5EED_FEED_A710_C0DE
_SEQ_BITS = 48
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_NONCE = 0xFFFF
_WORD = 16

AWKWARD_PREFIX = 'a%2B+ /?&=#"\\:;,'
"""What `Quirks.awkward_cursors` puts before a cursor: characters that need percent-encoding in a URL, and escaping in JSON."""


class Place(NamedTuple):
    """What a cursor stands for; `origin` is the partition that handed it out."""

    origin: int
    base: int
    ahead: dict[int, int]


def encode(
    origin: int, base: int, ahead: dict[int, int] | None = None, *, nonce: int | None = None
) -> str:
    """The cursor of a place. Cursors with different nonces differ and stand for the same place."""
    words = [_scramble(origin, base)]
    if ahead:
        words += [_scramble(sub, seq) for sub, seq in sorted(ahead.items())]
    if nonce is not None:
        words.append(_scramble(_NONCE, nonce))
    return "".join(words)


def decode(cursor: str) -> Place:
    """The place of a cursor. Raises ValueError for what can't be one."""
    if not cursor or len(cursor) % _WORD or not cursor.isascii():
        raise ValueError("not a cursor of this feed")
    words = [_restore(cursor[at : at + _WORD]) for at in range(0, len(cursor), _WORD)]
    origin, base = words[0]
    return Place(origin, base, {sub: seq for sub, seq in words[1:] if sub != _NONCE})


def _scramble(high: int, low: int) -> str:
    return f"{((high << _SEQ_BITS | low) ^ _TWIST) * _FACTOR & _MASK:016x}"


def _restore(word: str) -> tuple[int, int]:
    number = (int(word, 16) * _INVERSE & _MASK) ^ _TWIST
    return number >> _SEQ_BITS, number & _SEQ_MASK
