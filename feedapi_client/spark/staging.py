"""The objects of a streaming query in its staging location, and its fence. Imports no Spark.

Each query has a folder of its own, named by its run id::

    <run>/driver/<k>            the k-th run of the query: its process, host, and start
    <run>/plan/<epoch>          JSON by zlib: what the epoch reads, and all that was known before
    <run>/data/<epoch>/<task>   what the first attempt of the task that staged anything got

All are written with create-if-absent: of two writers exactly one succeeds, and both continue with
the same bytes.

An object of events is, one after the other: ``FAS2``, the length of the head (4 bytes), its CRC-32
(4 bytes), the head as JSON, and an Arrow IPC stream for each partition that has events. The head
has the results of the task, and the length and CRC-32 of the streams: the first kilobytes tell the
driver how far a task came.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.protocol.text import shown
from feedapi_client.spark.fetch import FetchResult
from feedapi_client.spark.source_options import OptionError

_log = logging.getLogger(__name__)

MOST_INFLATED = 256 * 1024 * 1024
"""Bytes that a plan, or one batch of events, may take in memory: others may write there, too."""
_MAGIC = b"FAS2"
_PREFIX = struct.Struct("<4sII")
_UNREADABLE: tuple[type[Exception], ...] = (
    *(zlib.error, struct.error, ValueError, LookupError, TypeError, ArithmeticError),
    RecursionError,
)
_FIRST_READ = 256 * 1024
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_URL_IN_TEXT = re.compile(r"\b(\w++)://[^\s\"']+")  # no letter is looked at twice
_URL_PARTS = re.compile(r"[:/@?&=#\[\]]+")
_SCHEMES = frozenset(
    ["file", "s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https", "http"]
)
_WAYS = "give an s3://, gs://, az:// or file:// URL, or a path that driver and executors share"


class StagingError(StoreError):
    """The staging location failed, or an object in it is not what was written."""


class MissingObjectError(StagingError):
    """A staged object does not exist."""


class Objects:
    """The objects of one run. Every process opens the location for itself."""

    def __init__(self, location: str, run: str) -> None:
        self.location = location
        self.run = run
        self._store: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    @property
    def store(self) -> Any:
        if self._store is None:
            self._store = open_store(self.location)
        return self._store

    def driver_key(self, number: int) -> str:
        return f"{self.run}/driver/{number:012d}"

    def plan_key(self, epoch: int) -> str:
        return f"{self.run}/plan/{epoch:012d}"

    def data_key(self, epoch: int, task: int) -> str:
        return f"{self.run}/data/{epoch:012d}/{task:06d}"

    def create(self, key: str, content: bytes) -> bool:
        with self._explained("write", key):
            try:
                obstore.put(self.store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        with self._explained("read", key):
            return bytes(obstore.get(self.store, key).bytes())

    def head(self, key: str) -> list[FetchResult]:
        """Return the results of a task, without its events."""
        with self._explained("read", key):
            start = bytes(obstore.get_range(self.store, key, start=0, length=_FIRST_READ))
            missing = _head_end(start, key) - len(start)
            if missing > 0:
                more = obstore.get_range(self.store, key, start=len(start), length=missing)
                start += bytes(more)
        results = _head(start, key).results
        with whole(key):
            return msgspec.convert(results, list[FetchResult])

    def exists(self, key: str) -> bool:
        try:
            with self._explained("look up", key):
                obstore.head(self.store, key)
        except MissingObjectError:
            return False
        return True

    def numbers(self, folder: str, after: str | None = None) -> list[int]:
        """Return the numbers that objects in a folder are named by, behind the key `after`."""
        names = (key.rpartition("/")[2] for key in listed(self.store, folder, after))
        return [int(name) for name in names if name.isdecimal()]

    def delete(self, key: str) -> None:
        # FileNotFoundError: another process deleted it first
        with self._explained("delete", key), suppress(FileNotFoundError):
            obstore.delete(self.store, key)

    @contextmanager
    def _explained(self, verb: str, key: str) -> Iterator[None]:
        """Raise `StagingError` for what the object store raises, whose text may hold a secret."""
        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and verb != "write":
                raise MissingObjectError(f"staged object {key} is not there") from None
            why = reason(error, self.location)
            raise StagingError(f"could not {verb} the staged object {key}: {why}") from None


# ---------------------------------------------------------------------- the fence


class _Driver(msgspec.Struct):
    process: int
    host: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.process} on {shown(self.host)}, started {since} UTC"


class Fence:
    """The place of one run of a query among all its runs: of two, the newer one goes on.

    It saves work, and tells people. Exactness does not hang on it: plans and events are written
    once, whoever writes them.
    """

    def __init__(self, objects: Objects, number: int) -> None:
        self.number = number
        self._objects = objects

    @classmethod
    def claim(cls, objects: Objects, after: int = 0) -> Fence:
        """Claim the place behind all others; those up to `after` are taken."""
        me = msgspec.json.encode(_Driver(os.getpid(), socket.gethostname(), time.time()))
        taken = objects.numbers(f"{objects.run}/driver", objects.driver_key(after))
        number = max(taken, default=after) + 1
        while not objects.create(objects.driver_key(number), me):
            number += 1
        if objects.create(objects.driver_key(number), me):
            raise StagingError(
                "the staging location overwrites an object that was to be written only where there "
                "is none (If-None-Match, conditional writes): the micro-batches of a query are not "
                "safe there. Take another location, or a newer version of the object store"
            )
        return cls(objects, number)

    def check(self) -> None:
        """Raise `FencedError` when a later run took the place, `StagingError` for the location."""
        try:
            found = self._objects.get(self._objects.driver_key(self.number + 1))
        except MissingObjectError:
            return
        later = "unknown"
        with suppress(ValueError, OverflowError, OSError):
            later = str(msgspec.json.decode(found, type=_Driver))
        raise FencedError(
            f"a later run took the place of this one: {later}. This run stops without planning "
            "more; nothing needs to be done"
        )


# ---------------------------------------------------------------------- the format


class _Head(msgspec.Struct):
    results: Any
    size: int
    crc: int


def pack(results: Any, streams: Sequence[bytes] = ()) -> bytes:
    body = b"".join(streams)
    text = msgspec.json.encode(_Head(results, len(body), zlib.crc32(body)))
    return b"".join([_PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)), text, body])


def unpack(content: bytes, key: str) -> tuple[Any, memoryview]:
    head, body = _head(content, key), memoryview(content)[_head_end(content, key) :]
    if (len(body), zlib.crc32(body)) != (head.size, head.crc):
        raise torn(key)
    return head.results, body


def inflate(content: bytes, key: str) -> bytes:
    _check_format(content, key)
    inflater = zlib.decompressobj()
    with whole(key):
        inflated = inflater.decompress(content, MOST_INFLATED)
    if not inflater.eof or inflater.unused_data:
        raise torn(key)
    return inflated


def _head(content: bytes, key: str) -> _Head:
    text = content[_PREFIX.size : _head_end(content, key)]
    _, length, crc = _PREFIX.unpack_from(content)
    if (len(text), zlib.crc32(text)) != (length, crc):
        raise torn(key)
    with whole(key):
        return msgspec.json.decode(text, type=_Head)


def _head_end(start: bytes, key: str) -> int:
    _check_format(start, key)
    if len(start) < _PREFIX.size or not start.startswith(_MAGIC):
        raise torn(key)
    return _PREFIX.size + int(_PREFIX.unpack_from(start)[1])


def _check_format(start: bytes, key: str) -> None:
    found, known = start[3:4], _MAGIC[3:]
    if not start.startswith(_MAGIC[:3]) or found == known:
        return
    if found > known:
        raise StagingError(newer_format(f"staged object {key}", found[0] - 48, known[0] - 48))
    raise StagingError(
        f"staged object {key} was written before version 1.0, in a format that this version does "
        "not read: begin with a new checkpoint, with feedapi ingest --resume-from-table, or with "
        "option startingCursors and what feedapi cursors ls --checkpoint of that version prints"
    )


def torn(key: str) -> StagingError:
    return StagingError(
        f"staged object {key} is torn or damaged: it is not what was written there. Rows may have "
        "been delivered from it before, so it is not fetched again. If the sink has not committed "
        "this micro-batch, delete the object and restart the query"
    )


@contextmanager
def whole(key: str, *more: type[Exception]) -> Iterator[None]:
    """Raise `StagingError` where the block can't read it; `more` are errors of its library."""
    try:
        yield
    except _UNREADABLE + more:
        raise torn(key) from None


def newer_format(what: str, found: int, known: int) -> str:
    return (
        f"{what} was written by a newer version of feedapi_client (format {found}, this one reads "
        f"up to {known}): run the query with that version"
    )


# ---------------------------------------------------------------------- the location


def open_store(location: str) -> Any:
    """Raises `StagingError`, which says why, and never quotes the URL."""
    url = location if _SCHEME.match(location) else Path(location).absolute().as_uri()
    scheme = url.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        raise StagingError(f"staging locations can't be {scheme}: URLs: {_WAYS}")
    try:
        return from_url(url, mkdir=True) if scheme == "file" else from_url(url)
    except (BaseError, OSError, ValueError, TypeError) as error:
        # The chained error would quote the URL, which may hold a secret, but for a path.
        place = url if scheme == "file" else f"{scheme}://…"
        raise StagingError(
            f"the staging location ({place}) can't be opened: {reason(error, url)}"
        ) from None


def listed(store: Any, folder: str, after: str | None = None) -> Iterator[str]:
    try:
        for page in obstore.list(store, prefix=folder, offset=after):
            for entry in page:
                yield entry["path"]
    except (BaseError, OSError) as error:
        raise StagingError(f"could not list the staging location: {reason(error, '')}") from None


def reason(error: Exception, url: str) -> str:
    """Return the first line of an object store's error, without what a URL in it may hold."""
    text = str(error).strip().split("\n", 1)[0]
    text = _URL_IN_TEXT.sub(r"\1://…", text)
    if not url.startswith(("file:", "/")):
        parts = _URL_PARTS.split(url)[1:]
        for part in sorted((part for part in parts if len(part) > 2), key=len, reverse=True):
            text = text.replace(part, "…")
    return f"{type(error).__name__}: {text[:200]}"


@contextmanager
def harmless(problem: str) -> Iterator[None]:
    """Log that the file system fails where it only tidies up: every row is there all the same."""
    try:
        yield
    except StagingError as error:
        _log.warning("%s: %s", problem, error)
    except (OSError, BaseError) as error:  # whose text may hold a secret
        _log.warning("%s: %s", problem, type(error).__name__)


def default_location() -> str:
    """Return the folder where epochs are staged by default: see `private_folder`.

    PySpark does not tell a data source which master it runs on. Tasks of executors on other
    machines fail before they fetch anything: the plan of their epoch is not there.
    """
    return private_folder("feedapi-staging", "set option stagingLocation").as_uri()


def private_folder(name: str, advice: str = "set TMPDIR to a folder of your own") -> Path:
    """Raises `OptionError` for one of another user, who could read and change what is there."""
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OptionError(f"feedapi source: {folder} belongs to another user: {advice}")
    return folder
