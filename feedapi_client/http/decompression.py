"""Content codings undone in bounded steps (R16).

httpx inflates each received chunk whole, and codings upon codings: a response of a kilobyte can
take gigabytes. Here one coding is undone, in pieces of at most `STEP` bytes.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

STEP = 64 * 1024
"""The largest piece, in bytes."""
_ZSTD_WINDOW_LOG = 23
"""RFC 9659: a zstd window over 8 MiB is not to be expected of a Content-Encoding."""


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


@cache
def accept_encoding() -> str:
    """The codings that can be undone, for the request header of that name."""
    return ", ".join(name for name in ("gzip", "zstd") if name in _CODINGS)


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
        raise UnsupportedCodingError(
            "its content coding was not asked for (accepted: gzip, and zstd with the extra 'zstd')"
        )
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


class _Zstd:
    """zstd, in one or several frames."""

    def __init__(self, new: Callable[[], Any], error: type[Exception]) -> None:
        self._new = new
        self._error = error
        self._frame: Any = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or self._has_more():
            if self._frame is None:
                self._frame = self._new()
            try:
                piece = self._frame.decompress(data, STEP)
            except self._error as error:
                raise CodingError(f"its compressed data is damaged ({error})") from None
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
            if piece:
                yield piece

    def _has_more(self) -> bool:
        return self._frame is not None and not self._frame.needs_input

    def finish(self) -> None:
        if self._frame is not None:
            raise CodingError("its compressed data is incomplete")


def _codings() -> dict[str, Callable[[], Decompressor]]:
    codings: dict[str, Callable[[], Decompressor]] = {
        "gzip": lambda: _Zlib(zlib.MAX_WBITS + 16),
        "x-gzip": lambda: _Zlib(zlib.MAX_WBITS + 16),
        "deflate": lambda: _Zlib(zlib.MAX_WBITS),
    }
    try:
        zstd: Any
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        return codings
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    codings["zstd"] = lambda: _Zstd(lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError)
    return codings


_CODINGS = _codings()
