"""`Staging`: the objects of one query in the staging location. Imports no Spark.

Each query has a folder of its own, named by its run id::

    <run>/plan/<epoch>           what the epoch reads, and all that was known when it was planned
    <run>/data/<epoch>/<group>   what the first task that fetched the group got
    <run>/seen/<epoch>/<group>   empty: rows of that object may have been delivered

All are written with create-if-absent: of two writers exactly one succeeds, and both continue with
the same bytes.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging.format import header_size, unpack_header
from feedapi_client.spark.staging.staging_errors import MissingObjectError, StagingError

_log = logging.getLogger(__name__)

_FIRST_READ = 64 * 1024
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_URL_IN_TEXT = re.compile(r"(\w+)://[^\s\"']+")
_URL_PARTS = re.compile(r"[:/@?&=#\[\]]+")
_SCHEMES = frozenset(
    ["file", "s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https", "http"]
)
_WAYS = "give an s3://, gs://, az:// or file:// URL, or a path that driver and executors share"
_NO_STORE = {
    "dbfs": "dbfs: is a file system of the JVM, which Python tasks can't write to: ",
    "hdfs": "hdfs: is a file system of the JVM, which Python tasks can't write to: ",
    "memory": "memory: is not shared by driver and executors: ",
}


@contextmanager
def harmless(problem: str) -> Iterator[None]:
    """Log that the file system fails where it only tidies up: every row is there all the same."""
    try:
        yield
    except StagingError as error:
        _log.warning("%s: %s", problem, error)
    except (OSError, BaseError) as error:  # whose text may hold a secret
        _log.warning("%s: %s", problem, type(error).__name__)


class Staging:
    """The objects of one run.

    Picklable: every process opens the location for itself. All methods may be called concurrently.
    """

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
        """The obstore store, opened at first use. Raises `StagingError`."""
        if self._store is None:
            self._store = open_store(self.location)
        return self._store

    def plan_key(self, epoch: int) -> str:
        """Return the key of an epoch's plan."""
        return f"{self.run}/plan/{epoch:012d}"

    def data_key(self, epoch: int, group: int) -> str:
        """Return the key of a group's staged events."""
        return f"{self.run}/data/{epoch:012d}/{group:06d}"

    def create(self, key: str, content: bytes) -> bool:
        """Write the object unless it exists. Return whether it did not. Raises `StagingError`."""
        with self._explained("write", key):
            try:
                obstore.put(self.store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def mark_delivered(self, key: str) -> None:
        """Note that rows of a staged object may be delivered from now on. Raises `StagingError`."""
        self.create(_seen_key(key), b"")

    def check_not_delivered(self, key: str) -> None:
        """Raise `StagingError` when rows of a staged object were delivered. It must not be gone."""
        if self.exists(_seen_key(key)):
            raise StagingError(
                f"staged object {key} is gone from the staging location, and a sink may have got "
                "rows of it: what is fetched now would differ from them. Was the location cleaned "
                "by hand, or by a lifecycle rule? Restore the object. If the sink has committed "
                "nothing of this micro-batch, delete its object below seen/ instead"
            )

    def read(self, key: str) -> bytes:
        """Return the whole object. Raises `MissingObjectError`, `StagingError`."""
        with self._explained("read", key):
            return bytes(obstore.get(self.store, key).bytes())

    def read_header(self, key: str) -> Any:
        """Return the header only. Raises `MissingObjectError`, `StagingError`."""
        with self._explained("read", key):
            start = bytes(obstore.get_range(self.store, key, start=0, length=_FIRST_READ))
            size = header_size(start, key)
            if len(start) < size:
                rest = size - len(start)
                start += bytes(obstore.get_range(self.store, key, start=len(start), length=rest))
        return unpack_header(start, key)[0]

    def exists(self, key: str) -> bool:
        """Whether the object exists. Raises `StagingError`."""
        try:
            with self._explained("look up", key):
                obstore.head(self.store, key)
        except MissingObjectError:
            return False
        return True

    def numbers(self, prefix: str) -> list[int]:
        """Return the numbers that objects below a prefix are named by. Raises `StagingError`."""
        names = (key.rpartition("/")[2] for key, _, _ in listed(self.store, prefix))
        return [int(name) for name in names if name.isdigit()]

    def delete_before(self, epoch: int) -> int:
        """Delete all objects of earlier epochs and return their number.

        Data is deleted before plans. If the process dies between, the next call finds the rest.
        Raises `StagingError`.
        """
        keys = ((key, [*key.split("/"), "", ""][2]) for key, _, _ in listed(self.store, self.run))
        return self._delete([key for key, of in keys if of.isdecimal() and int(of) < epoch])

    def delete_all(self) -> None:
        """Delete the run. Raises `StagingError`."""
        self._delete([key for key, _, _ in listed(self.store, self.run)])

    def _delete(self, keys: Collection[str]) -> int:
        for key in sorted(keys, key=lambda key: ("/plan/" in key, key)):
            self.delete(key)
        return len(keys)

    def keep_alive(self) -> None:
        """Note that a query uses the run, for a later clean-up. Raises `StagingError`."""
        self.replace(f"{self.run}/alive", b"")

    def replace(self, key: str, content: bytes) -> None:
        """Write the object, whether it exists or not. Raises `StagingError`."""
        with self._explained("write", key):
            obstore.put(self.store, key, content, use_multipart=False)

    def delete(self, key: str) -> None:
        """Delete the object if it exists. Raises `StagingError`."""
        # FileNotFoundError: another process deleted it first
        with self._explained("delete", key), suppress(FileNotFoundError):
            obstore.delete(self.store, key)

    @contextmanager
    def _explained(self, verb: str, key: str) -> Iterator[None]:
        """Raise `StagingError` for what the object store raises."""
        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and verb != "write":
                raise MissingObjectError(f"staged object {key} is not there") from error
            why = reason(error, self.location)
            raise StagingError(f"could not {verb} the staged object {key}: {why}") from error


def open_store(location: str) -> Any:
    """Return the obstore store of a URL or a plain path.

    Arguments:
        location: ``s3://`` (or ``s3a://``), ``gs://``, ``az://`` (or ``abfss://``), ``file://`` or
            a path. Region, endpoint and credentials come from the environment of this process, as
            for every tool of that cloud.

    Raises:
        StagingError: it can't be opened. The message says why, and never quotes the URL.
    """
    url = location if _SCHEME.match(location) else Path(location).absolute().as_uri()
    scheme = url.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        why = _NO_STORE.get(scheme, f"staging locations can't be {scheme}: URLs: ")
        raise StagingError(why + _WAYS)
    try:
        return from_url(url, mkdir=True) if scheme == "file" else from_url(url)
    except (BaseError, OSError, ValueError, TypeError) as error:
        # The chained error would quote the URL, which may hold a secret, but for a path.
        place = url if scheme == "file" else f"{scheme}://…"
        raise StagingError(
            f"the staging location ({place}) can't be opened: {reason(error, url)}"
        ) from None


def listed(store: Any, prefix: str | None = None) -> Iterator[tuple[str, int, datetime]]:
    """Yield key, size and time of all objects. Raises `StagingError`."""
    try:
        for page in obstore.list(store, prefix=prefix):
            for entry in page:
                yield entry["path"], entry["size"], entry["last_modified"]
    except (BaseError, OSError) as error:
        raise StagingError(f"could not list the staging location: {reason(error, '')}") from error


def reason(error: Exception, url: str) -> str:
    """Return the first line of an object store's error, without what a URL in it may hold."""
    text = str(error).strip().split("\n", 1)[0]
    text = _URL_IN_TEXT.sub(r"\1://…", text)
    if not url.startswith(("file:", "/")):
        parts = _URL_PARTS.split(url)[1:]
        for part in sorted((part for part in parts if len(part) > 2), key=len, reverse=True):
            text = text.replace(part, "…")
    return f"{type(error).__name__}: {text[:200]}"


def default_location() -> str:
    """Return the folder where epochs are staged by default: see `private_folder`.

    PySpark does not tell a data source which master it runs on. Tasks of executors on other
    machines fail before they fetch anything: the plan of their epoch is not there.
    """
    return private_folder("feedapi-staging", "set option stagingLocation").as_uri()


def private_folder(name: str, advice: str = "set TMPDIR to a folder of your own") -> Path:
    """Return a temporary folder of this user on this machine.

    Raises `OptionError` for one of another user, who could read and change what is there.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OptionError(f"feedapi source: {folder} belongs to another user: {advice}")
    return folder


def _seen_key(key: str) -> str:
    return key.replace("/data/", "/seen/")
