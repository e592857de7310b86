"""The format of a staged object. Imports no Spark.

An object is, one after the other:

- ``FAS1``, the length of the header (4 bytes), the CRC-32 of the header (4 bytes);
- the header: JSON, which also holds the lengths of the sections;
- the sections: zstd frames.

The first kilobytes therefore tell the driver how far a task came.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import orjson
import zstandard

from feedapi_client.spark.staging.staging_errors import StagingError

MAGIC = b"FAS1"
_PREFIX = struct.Struct("<4sII")
_LEVEL = 1
_PIECE = 4 * 1024 * 1024
MOST_INFLATED = 256 * 1024 * 1024
"""Bytes of a line, and of a section that is read as a whole: others may write to the location."""


def pack(header: Any, sections: Sequence[Iterable[bytes]] = ()) -> bytes:
    """Return an object of a JSON header and sections, each an iterable of compressed chunks."""
    bodies = [b"".join(section) for section in sections]
    text = orjson.dumps(
        {"sections": [len(body) for body in bodies], "header": header},
        option=orjson.OPT_NON_STR_KEYS,
    )
    return b"".join([_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)), text, *bodies])


def header_size(start: bytes, key: str) -> int:
    """Return the bytes of prefix and header. Raises `StagingError`: torn, or of a newer version."""
    if start[:3] == MAGIC[:3] and start[3:4] > MAGIC[3:]:
        raise StagingError(
            f"staged object {key} was written by a newer version of feedapi_client: run the query "
            "with that version again"
        )
    if len(start) < _PREFIX.size or start[:4] != MAGIC:
        raise torn(key)
    return _PREFIX.size + int(_PREFIX.unpack_from(start)[1])


def unpack_header(content: bytes, key: str) -> tuple[Any, list[int], int]:
    """Return the header, lengths of the sections, and where they begin. Raises `StagingError`."""
    end = header_size(content, key)
    text = content[_PREFIX.size : end]
    if len(content) < end or zlib.crc32(text) != _PREFIX.unpack_from(content)[2]:
        raise torn(key)
    with whole(key):
        found = msgspec.json.decode(text, type=_Header)
    return found.header, found.sections, end


def unpack(content: bytes, key: str) -> tuple[Any, list[memoryview]]:
    """Return the header and the sections, still compressed. Raises `StagingError`."""
    header, lengths, at = unpack_header(content, key)
    if len(content) != at + sum(lengths):
        raise torn(key)
    view, sections = memoryview(content), []
    for length in lengths:
        sections.append(view[at : at + length])
        at += length
    return header, sections


class _Header(msgspec.Struct):
    header: Any
    sections: list[int]


def torn(key: str) -> StagingError:
    """Return the error for an object that is not what was written."""
    return StagingError(
        f"staged object {key} is torn or damaged: it is not what was written there. Rows may have "
        "been delivered from it before, so it is not fetched again. If the sink has not committed "
        "this micro-batch, delete the object and restart the query"
    )


@contextmanager
def whole(key: str) -> Iterator[None]:
    """Raise `StagingError` where the block can't read what an object holds."""
    try:
        yield
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        raise torn(key) from error


class Section:
    """A section that is being written.

    Data is compressed at once, so that a large epoch needs little memory.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._chunks: list[bytes] = []
        self.size = 0
        """Compressed bytes so far."""

    def add(self, data: bytes) -> None:
        """Append the bytes."""
        self._keep(self._compressor.compress(data))

    def finish(self) -> list[bytes]:
        """Return the compressed chunks. Nothing can be added afterwards."""
        self._keep(self._compressor.flush())
        return self._chunks

    def _keep(self, chunk: bytes) -> None:
        if chunk:
            self._chunks.append(chunk)
            self.size += len(chunk)


def compress(data: bytes) -> bytes:
    """Return the bytes as a section."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def decompress(section: memoryview, key: str) -> bytes:
    """Return the bytes of a section. Raises `StagingError` for a torn one, and a too large one."""
    with whole(key), _reader(section) as reader:
        data = reader.read(MOST_INFLATED + 1)
    if len(data) > MOST_INFLATED:
        raise torn(key)
    return data


def decompress_lines(section: memoryview, key: str, size: int) -> Iterator[bytes]:
    """Yield the section in pieces of about `size` bytes; each but the last ends with a newline.

    Raises `StagingError` for a torn one, and for a line that is too long.
    """
    with _reader(section) as reader:
        while True:
            with whole(key):
                piece = reader.read(size)
                rest = reader.readline(MOST_INFLATED + 1) if piece else b""
            if len(rest) > MOST_INFLATED:
                raise torn(key)
            if not piece:
                return
            yield piece + rest


def _reader(section: memoryview) -> io.BufferedReader:
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(section, read_size=1 << 20))
