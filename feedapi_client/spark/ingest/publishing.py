"""Publishes what a micro-batch wrote into folders of files: once, and whole.

A micro-batch is written to an attempt, a hidden folder of each table that no other attempt uses.
The first attempt that is noted at the staging location, with create-if-absent, is the one that
counts (`Decisions`). Its folders are then moved to where readers look (`TableFolder.publish`), by
whoever comes first: the run that wrote them, or the next one. Nothing is ever deleted that readers
see, whenever a run is paused, killed, or wakes up.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError

from feedapi_client.errors import FencedError
from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.staging.location import Staging, harmless, listed, open_store
from feedapi_client.spark.staging.staging_errors import (
    MissingObjectError,
    StagingError,
    newer_format,
)

VERSION = 1
"""Of the format of decisions."""
_FOLDER = "commits"
_KEPT = 100
"""Decisions that are kept for runs that wake up late."""
_OBJECT_STORES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
_COPIES = 16
_COPIED_AT_ONCE = 5 * 2**30
"""Bytes of an object that S3 copies in one request."""
_PART = 64 * 2**20
"""Bytes. S3 takes 10,000 parts of an object."""


class _RenamingFolder:
    """A table's folder in a file system that is mounted here. Paths are relative.

    A folder gets another name in one step.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, path: str) -> set[str]:
        """Return the names of files and folders directly below; none where there is nothing."""
        try:
            return set(os.listdir(self._root / path))
        except FileNotFoundError:
            return set()

    def delete(self, path: str) -> None:
        """Delete the folder if it exists."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root / path)

    def publish(self, attempt: str, final: str) -> None:
        """Move a written folder to where readers see it, unless another one is there already.

        May be called again, also by several processes at once. Raises `IngestError` where there is
        neither of the two.
        """
        if not self.names(final):
            target = self._root / final
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                (self._root / attempt).rename(target)
            except OSError as error:
                if not self.names(final):
                    raise _gone(attempt) from error
        with harmless(f"{attempt} was not deleted"):
            self.delete(attempt)

    def first(self, path: str, text: str) -> str:
        """Write a file unless there is one. Return what it says, of several writers the first's."""
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        _create(file, text)
        return file.read_text("utf-8")


def _create(file: Path, text: str) -> None:
    """Write a file unless there is one: as a whole, where the file system has links."""
    new = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(text, "utf-8")
        try:
            os.link(new, file)
        except FileExistsError:
            return
        except OSError:
            with suppress(FileExistsError), file.open("x", encoding="utf-8") as whole:
                whole.write(text)
    finally:
        new.unlink(missing_ok=True)


class _CopyingFolder:
    """The same in an object store, which has no folders: objects are copied, then deleted.

    Readers see one object after the other.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def names(self, path: str) -> set[str]:
        found = obstore.list_with_delimiter(self._store, prefix=f"{path}/")
        keys = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return {key.rstrip("/").rpartition("/")[2] for key in keys}

    def delete(self, path: str) -> None:
        keys = self._below(path)
        if keys:
            obstore.delete(self._store, [f"{path}/{key}" for key in keys])

    def publish(self, attempt: str, final: str) -> None:
        written, there = self._below(attempt), self._below(final)
        if not written and not there:
            raise _gone(attempt)

        def copy(key: str) -> None:
            source, target = f"{attempt}/{key}", f"{final}/{key}"
            if written[key] <= _COPIED_AT_ONCE:
                obstore.copy(self._store, source, target)
                return
            asyncio.run(self._upload(source, target, written[key]))

        if there.keys() <= written.keys():  # else it is another attempt's, and whole
            with ThreadPoolExecutor(_COPIES, "feedapi-publish") as pool:
                list(pool.map(copy, sorted(written.keys() - there.keys())))
        with harmless(f"{attempt} was not deleted"):
            self.delete(attempt)

    def first(self, path: str, text: str) -> str:
        with suppress(AlreadyExistsError):
            obstore.put(self._store, path, text.encode(), mode="create", use_multipart=False)
        return bytes(obstore.get(self._store, path).bytes()).decode()

    async def _upload(self, source: str, target: str, size: int) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, size, _PART):
                length = min(_PART, size - start)
                part = await obstore.get_range_async(
                    self._store, source, start=start, length=length
                )
                yield bytes(part)

        await obstore.put_async(self._store, target, parts(), chunk_size=_PART)

    def _below(self, path: str) -> dict[str, int]:
        """Return the objects below a path, and their sizes in bytes."""
        return {key.removeprefix(f"{path}/"): size for key, size, _ in listed(self._store, path)}


TableFolder = _RenamingFolder | _CopyingFolder


def open_folder(uri: str) -> TableFolder:
    """Return a table's folder.

    Arguments:
        uri: as Spark names it, nothing in it being quoted.

    Raises:
        IngestError: Python can't reach the file system.
    """
    scheme, _, path = uri.partition(":")
    if scheme == "file":
        return _RenamingFolder(Path(f"/{path.lstrip('/')}"))
    if scheme in _OBJECT_STORES:
        return _CopyingFolder(uri)
    raise IngestError(
        f"the tables are in {scheme}:, which only the JVM can reach: give s3://, gs://, abfss://, "
        "or a path that is mounted on the driver, such as /Volumes/... or /dbfs/...; or take "
        "format delta, whose tables the JVM writes"
    )


def _gone(attempt: str) -> IngestError:
    return IngestError(
        f"the folder {attempt} of a micro-batch that counts is not there, and was not published: "
        "its rows would be missing. Give the table that it was written to, restore it, or start "
        "over with --resume-from-table"
    )


class WrittenFiles(msgspec.Struct, frozen=True):
    """What one attempt wrote to one table. Folders may move, and be named in several ways."""

    table: str
    """Which of the pipeline's tables: output, bronze or rejected."""
    attempt: str
    final: str


class Decision(msgspec.Struct, frozen=True):
    """The attempt that counts for one micro-batch."""

    epoch: int
    tables: list[WrittenFiles]
    version: int = VERSION


class Decisions:
    """The decisions on the micro-batches of one query, at the staging location."""

    def __init__(self, location: str, query: str) -> None:
        self._staging = Staging(location, _FOLDER)
        self._prefix = f"{_FOLDER}/{query}"

    def find(self, number: int) -> Decision | None:
        """Return what was decided on a micro-batch. Raises `StagingError`."""
        try:
            found = msgspec.json.decode(self._staging.read(self._key(number)), type=Decision)
        except MissingObjectError:
            return None
        if found.version > VERSION:
            raise StagingError(newer_format(f"micro-batch {number}", found.version, VERSION))
        return found

    def decide(self, number: int, own: Decision) -> Decision:
        """Return `own`, or what another attempt decided first.

        Raises:
            FencedError: a later run has closed this one's attempts, and may have deleted them.
            StagingError: the location failed.
        """
        if self._settle(number, own.epoch, b"open") == b"closed":
            raise FencedError(f"a later run took the place of this one at micro-batch {number}")
        if self._staging.create(self._key(number), msgspec.json.encode(own)):
            with harmless("old decisions were not deleted"):
                for key, _, _ in list(listed(self._staging.store, self._prefix)):
                    old = key.rpartition("/")[2].partition("-")[0]
                    if old.isdecimal() and int(old) <= number - _KEPT:
                        self._staging.delete(key)
            return own
        return self.find(number) or own

    def close(self, number: int, epoch: int) -> bool:
        """Return whether the attempts of an earlier run at a micro-batch will never count.

        The run may still be writing: it is told so when it decides.
        """
        return self._settle(number, epoch, b"closed") == b"closed"

    def _settle(self, number: int, epoch: int, wanted: bytes) -> bytes:
        """Return what was settled first on the attempts of a run: open, or closed."""
        key = f"{self._key(number)}-{epoch}"
        return wanted if self._staging.create(key, wanted) else self._staging.read(key)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:012d}"
