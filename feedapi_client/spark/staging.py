"""Staged epochs (extra ``spark``): objects that are written once and read any number of times. Imports no Spark.

One query owns one *run*, a folder of the staging location::

    <run>/plan/<epoch>           what the epoch reads: groups of partitions with their cursors, and the lineage as it was then
    <run>/data/<epoch>/<group>   what the first task that fetched the group got: the winner, for all who come later

Both are created with create-if-absent, so that of two writers exactly one succeeds and both go on with the same bytes. An object is::

    "FAS1"  length of header (4 bytes)  CRC-32 of header (4 bytes)  header (JSON)  sections (zstd frames, their lengths stand in the header)

so that the driver learns how far a group came from its first kilobytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

try:
    import obstore
    import zstandard
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import from_url
except ImportError as error:  # pragma: no cover - the message is the point
    raise ImportError(
        "feedapi_client.spark needs the extra 'spark': pip install 'feedapi-client[spark]'"
    ) from error

import orjson

from feedapi_client.errors import StoreError

MAGIC = b"FAS1"
_PREFIX = struct.Struct("<4sII")
_FIRST_READ = 64 * 1024
_LEVEL = 1


class StagingError(StoreError):
    """The staging location failed, or what it holds is not what was written there."""


class MissingObjectError(StagingError):
    """A staged object is not there."""


class Staging:
    """The objects of one run. Picklable; every process opens the location for itself. All methods may be called concurrently."""

    def __init__(self, location: str, run: str) -> None:
        self.location = location
        self.run = run
        self._store: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    def __repr__(self) -> str:
        return f"<Staging of run {self.run}>"

    @property
    def store(self) -> Any:
        """The obstore store; opened at first use, because an open store can't be pickled everywhere. Raises `StagingError`."""
        if self._store is None:
            self._store = open_store(self.location)
        return self._store

    def plan_key(self, epoch: int) -> str:
        """Where the plan of an epoch is."""
        return f"{self.run}/plan/{epoch:012d}"

    def data_key(self, epoch: int, group: int) -> str:
        """Where the winner of a group is."""
        return f"{self.run}/data/{epoch:012d}/{group:06d}"

    def create(self, key: str, content: bytes) -> bool:
        """Write the object unless there is one: True when this call wrote it, False when another was first. Raises `StagingError`."""
        try:
            obstore.put(self.store, key, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise self._failed("write", key, error) from error
        return True

    def read(self, key: str) -> bytes:
        """The whole object. Raises `MissingObjectError`, `StagingError`."""
        try:
            return bytes(obstore.get(self.store, key).bytes())
        except FileNotFoundError as error:
            raise MissingObjectError(f"staged object {key} is not there") from error
        except (BaseError, OSError) as error:
            raise self._failed("read", key, error) from error

    def read_header(self, key: str) -> Any:
        """The header alone. Raises `MissingObjectError`, `StagingError`."""
        try:
            start = bytes(obstore.get_range(self.store, key, start=0, length=_FIRST_READ))
            size = header_size(start, key)
            if len(start) < size:
                start += bytes(
                    obstore.get_range(self.store, key, start=len(start), length=size - len(start))
                )
        except FileNotFoundError as error:
            raise MissingObjectError(f"staged object {key} is not there") from error
        except (BaseError, OSError) as error:
            raise self._failed("read", key, error) from error
        return unpack_header(start, key)[0]

    def exists(self, key: str) -> bool:
        """Whether the object is there. Raises `StagingError`."""
        try:
            obstore.head(self.store, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise self._failed("look up", key, error) from error
        return True

    def discard_before(self, epoch: int) -> int:
        """Delete all objects of earlier epochs and say how many there were. Data goes before plans: what a cut-off left behind is found again next time."""
        try:
            keys = [
                entry["path"]
                for page in obstore.list(self.store, prefix=self.run)
                for entry in page
            ]
            old = sorted(
                (key for key in keys if _epoch_of(key) < epoch),
                key=lambda key: ("/plan/" in key, key),
            )
            for key in old:
                _delete(self.store, key)
        except (BaseError, OSError) as error:
            raise self._failed("delete", f"{self.run}/", error) from error
        return len(old)

    def _failed(self, verb: str, key: str, error: Exception) -> StagingError:
        # The text of an object store's error may quote signed URLs; its first line names the fault.
        return StagingError(
            f"could not {verb} the staged object {key}: {type(error).__name__}: {_first_line(error)}"
        )


def open_store(location: str) -> Any:
    """The obstore store of a URL (``s3://``, ``gs://``, ``az://``, ``file://`` or a plain path). Raises `StagingError` that does not quote the URL's query."""
    url = location if "://" in location else f"file://{location}"
    try:
        return from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
    except (BaseError, OSError, ValueError, TypeError):
        scheme = url.partition("://")[0]
        # Not the library's text, and not the error itself: both quote the URL.
        raise StagingError(
            f"the staging location ({scheme}://…) can't be opened: give an s3://, gs://, az:// or file:// URL"
        ) from None


def _delete(store: Any, key: str) -> None:
    with suppress(FileNotFoundError):  # another cleaner was faster
        obstore.delete(store, key)


def _epoch_of(key: str) -> int:
    parts = key.split("/")
    for kind in ("plan", "data"):
        if kind in parts:
            number = parts[parts.index(kind) + 1]
            return int(number) if number.isdigit() else 2**63
    return 2**63


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split("?", 1)[0][:200]


# ---------------------------------------------------------------------- the format of an object


def pack(header: Any, sections: Sequence[Iterable[bytes]] = ()) -> bytes:
    """An object of a JSON header and sections, each an iterable of already compressed chunks."""
    bodies = [b"".join(section) for section in sections]
    text = orjson.dumps(
        {"sections": [len(body) for body in bodies], "header": header},
        option=orjson.OPT_NON_STR_KEYS,
    )
    return b"".join([_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)), text, *bodies])


def header_size(start: bytes, key: str) -> int:
    """How many bytes the prefix and the header of the object take."""
    if len(start) < _PREFIX.size or start[:4] != MAGIC:
        raise _torn(key)
    return _PREFIX.size + int(_PREFIX.unpack_from(start)[1])


def unpack_header(content: bytes, key: str) -> tuple[Any, list[int], int]:
    """The header, the lengths of the sections, and where the first begins. Raises `StagingError` for a torn object."""
    end = header_size(content, key)
    text = content[_PREFIX.size : end]
    if len(content) < end or zlib.crc32(text) != _PREFIX.unpack_from(content)[2]:
        raise _torn(key)
    whole = orjson.loads(text)
    return whole["header"], whole["sections"], end


def unpack(content: bytes, key: str) -> tuple[Any, list[memoryview]]:
    """The header and the sections, still compressed. Raises `StagingError` for a torn object."""
    header, lengths, at = unpack_header(content, key)
    if len(content) != at + sum(lengths):
        raise _torn(key)
    view, sections = memoryview(content), []
    for length in lengths:
        sections.append(view[at : at + length])
        at += length
    return header, sections


def _torn(key: str) -> StagingError:
    return StagingError(
        f"staged object {key} is torn: the storage lost a part of what was written. Rows may have been delivered from it before, so it is not fetched again. "
        "If the sink has not committed this micro-batch, delete the object and restart the query"
    )


class Section:
    """A section under construction: what is added is compressed at once, so that a large epoch stays small in memory."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._chunks: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> None:
        """Append the bytes."""
        self._keep(self._compressor.compress(data))

    def finish(self) -> list[bytes]:
        """The compressed chunks; nothing can be added any more."""
        self._keep(self._compressor.flush())
        return self._chunks

    def _keep(self, chunk: bytes) -> None:
        if chunk:
            self._chunks.append(chunk)
            self.size += len(chunk)


def compress(data: bytes) -> bytes:
    """A section of one piece."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def decompress(section: memoryview, key: str) -> bytes:
    """A whole section. Raises `StagingError` for a torn one."""
    return b"".join(decompress_lines(section, key, 1 << 22))


def decompress_lines(section: memoryview, key: str, size: int) -> Iterator[bytes]:
    """The section in pieces of about `size` bytes that end behind a newline (the last one ends where the section does)."""
    rest = b""
    try:
        with zstandard.ZstdDecompressor().stream_reader(section, read_size=1 << 20) as reader:
            while chunk := reader.read(size):
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield rest + chunk[:cut]
                    rest = chunk[cut:]
                else:
                    rest += chunk
    except zstandard.ZstdError as error:
        raise _torn(key) from error
    if rest:
        yield rest
