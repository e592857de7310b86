"""Content codings undone in bounded steps (R16).

httpx inflates each received chunk whole, and codings upon codings: a response of a kilobyte can
take gigabytes. Here one coding is undone, in pieces of at most `STEP` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

STEP = 64 * 1024
"""The largest piece, in bytes."""


class CodingError(Exception):
    """A body that can't be decoded."""


class UnsupportedCodingError(CodingError):
    """A coding that was not asked for, or several on top of each other."""


class Decompressor(Protocol):
    """Undoes the coding of one body."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decoded pieces of the next bytes. Raises `CodingError`."""
        ...

    def finish(self) -> None:
        """The body is complete. Raises `CodingError` when its coding is not."""
        ...


def accept_encoding() -> str:
    """What is asked for, for the request header of that name."""
    return "gzip"


def decompressor(content_encoding: str) -> Decompressor:
    """The decompressor for a Content-Encoding header. Raises `UnsupportedCodingError`."""
    if not content_encoding:
        return _Identity()
    names = [name.strip().lower() for name in content_encoding.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return _Identity()
    if len(names) > 1:
        raise UnsupportedCodingError("it is compressed more than once")
    if names[0] not in _CODINGS:
        raise UnsupportedCodingError("its content coding was not asked for (accepted: gzip)")
    return _CODINGS[names[0]]()


class _Identity:
    def feed(self, data: bytes) -> Iterator[bytes]:
        return iter((data,))

    def finish(self) -> None:
        pass


class _Zlib:
    """gzip, in one or several members, and deflate."""

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._member: Any = None
        self._members = 0
        self._is_gzip = wbits > zlib.MAX_WBITS

    def feed(self, data: bytes) -> Iterator[bytes]:
        full = False
        while data or full:
            if self._member is None:
                if self._members:
                    # Further members, and zeros that pad the end, are gzip's alone.
                    data = data.lstrip(b"\0") if self._is_gzip else b""
                if not data:
                    return
                self._member = zlib.decompressobj(self._wbits)
                self._members += 1
            try:
                piece = self._member.decompress(data, STEP)
            except zlib.error as error:
                raise CodingError(f"its compressed data is damaged ({error})") from None
            # A full piece: more may be held inside, even when all input was taken.
            full = len(piece) == STEP
            data = self._member.unconsumed_tail
            if self._member.eof:
                data, full, self._member = self._member.unused_data, False, None
            if piece:
                yield piece

    def finish(self) -> None:
        if self._member is not None:
            raise CodingError("its compressed data is incomplete")


_CODINGS: dict[str, Callable[[], Decompressor]] = {
    "gzip": lambda: _Zlib(zlib.MAX_WBITS + 16),
    "x-gzip": lambda: _Zlib(zlib.MAX_WBITS + 16),
    "deflate": lambda: _Zlib(zlib.MAX_WBITS),
}
