"""Content codings undone in bounded steps (R16).

httpx inflates each received chunk whole, and codings upon codings: a response of a kilobyte can
take gigabytes. Here one coding is undone, in pieces of at most `STEP` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

STEP = 64 * 1024  # the largest piece, in bytes
ACCEPT_ENCODING = "gzip"
_WBITS = {"gzip": zlib.MAX_WBITS + 16, "x-gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS}


class CodingError(Exception): ...


class UnsupportedCodingError(CodingError):
    """A coding that was not asked for, or several on top of each other."""


class Decompressor:
    """Undoes the coding of one body: none, deflate, or gzip in one or several members. Raises
    `UnsupportedCodingError` for a Content-Encoding of another kind.
    """

    def __init__(self, content_encoding: str) -> None:
        names = [name.strip().lower() for name in content_encoding.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        if len(names) > 1:
            raise UnsupportedCodingError("it is compressed more than once")
        if names and names[0] not in _WBITS:
            raise UnsupportedCodingError("its content coding was not asked for (accepted: gzip)")
        self._wbits = _WBITS[names[0]] if names else 0
        self._member: Any = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        return self._inflate(data) if self._wbits else iter((data,))

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        full = False
        while data or full:
            if self._member is None:
                if self._members:
                    # Further members, and zeros that pad the end, are gzip's alone.
                    data = data.lstrip(b"\0") if self._wbits > zlib.MAX_WBITS else b""
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
        """The body is complete. Raises `CodingError` when its coding is not."""
        if self._member is not None:
            raise CodingError("its compressed data is incomplete")
