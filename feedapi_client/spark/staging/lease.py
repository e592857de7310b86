"""`QueryLease`: which of the runs of one query may write. Imports no Spark.

Each run claims an epoch of its own, a number above all earlier ones, with create-if-absent::

    leases/<name>/<epoch>     who claimed it, and a beat that is raised every few seconds

The highest epoch is the one that may write. A run that finds a lease whose beat is raised is
refused. One whose beat stands still is taken over: its owner has died, or is paused. Should that
owner wake up, it finds the higher epoch before its next write. No clocks are compared: whoever
wants the lease watches the beat for `EXPIRES_AFTER` seconds of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from feedapi_client.errors import FencedError
from feedapi_client.spark.staging.location import Staging
from feedapi_client.spark.staging.staging_errors import (
    MissingObjectError,
    StagingError,
    newer_format,
)

_log = logging.getLogger(__name__)

VERSION = 1
"""Of the format of leases. A lease of a newer format is never taken over."""
RENEWED_EVERY = 5.0
EXPIRES_AFTER = 30.0
_FOLDER = "leases"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What is stored of one claim."""

    epoch: int
    machine: str
    """Of the process identifier: differs between machines, their restarts, and containers."""
    pid: int
    started: str
    """When the process began, which tells it from a later one with its identifier."""
    host: str
    since: float
    """Seconds since 1970, for people."""
    beat: int = 0
    released: bool = False
    version: int = VERSION

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, started {since} UTC"

    def is_over(self) -> bool:
        """Whether the owner gave the lease back, or is known to have ended."""
        if self.released:
            return True
        same_machine = self.machine and self.machine == _machine()
        return bool(same_machine) and _started(self.pid) != self.started


class QueryLease:
    """The right to write of one run. Thread-safe. Picklable: the copy has no claim.

    Arguments:
        location: the staging location.
        query: what tells the query from others, such as the location of its checkpoint.
        renewed_every, expires_after: seconds.
    """

    def __init__(
        self,
        location: str,
        query: str,
        renewed_every: float = RENEWED_EVERY,
        expires_after: float = EXPIRES_AFTER,
    ) -> None:
        self.query = query
        self._staging = Staging(location, _FOLDER)
        self._prefix = _prefix(query)
        self._renewed_every = renewed_every
        self._expires_after = expires_after
        self._record: LeaseRecord | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.in_use: Callable[[], bool] = lambda: True
        """Returns False once the run is over: the lease is then given back."""

    def __reduce__(self) -> Any:
        made = (self._staging.location, self.query, self._renewed_every, self._expires_after)
        return (QueryLease, made)

    def __repr__(self) -> str:
        return f"<QueryLease of {self.query}, epoch {self._record and self._record.epoch}>"

    @property
    def epoch(self) -> int:
        """The claimed epoch, 0 before."""
        return 0 if self._record is None else self._record.epoch

    def acquire(self) -> None:
        """Claim an epoch, unless this object has one. May wait for `expires_after` seconds.

        Raises:
            FencedError: another run is under way.
            StagingError: the location failed.
        """
        if self._record is not None:
            return
        earlier = _held.get(self._prefix)
        if earlier is not None and not earlier.in_use():
            earlier.release()
        holder = self._newest()
        if holder is not None and not holder.is_over():
            self._watch(holder)
        self._claim(holder)
        _held[self._prefix] = self
        threading.Thread(target=self._renew, name="feedapi-lease", daemon=True).start()

    def check(self) -> None:
        """Check that this run may write.

        Raises:
            FencedError: a later run has claimed a higher epoch.
            StagingError: the lease is gone, or the location failed.
        """
        newest = max(self._epochs(), default=0)
        if newest < self.epoch:
            raise StagingError(
                f"the lease of this query ({self.query}) is gone from the staging location. Was "
                "the location deleted, or cleaned by hand or by a lifecycle rule? This run stops "
                "without writing: restore the location, and start again"
            )
        if newest > self.epoch:
            raise FencedError(
                f"a later run took the place of this one ({self.query}), which was paused, or cut "
                f"off from its staging location: it has epoch {newest}, and this run {self.epoch}. "
                "This run stops without writing; nothing needs to be done"
            )

    def release(self) -> None:
        """Give the lease back, so that the next run need not wait."""
        _held.pop(self._prefix, None)
        with self._lock:
            record, self._record = self._record, None
            self._end.set()
            try:
                if record is not None:
                    self._store(record, released=True)
            except StagingError as error:
                _log.warning("the lease was not given back, the next run waits for it: %s", error)

    # ------------------------------------------------------------------ inside

    def _watch(self, holder: LeaseRecord) -> None:
        """Return when the lease is free. Raises `FencedError` when its beat was raised."""
        end = time.monotonic() + self._expires_after
        while time.monotonic() < end:
            time.sleep(self._renewed_every / 5)
            now = self._newest()
            if now is None or now.is_over():
                return
            if (now.epoch, now.beat) != (holder.epoch, holder.beat):
                raise self._refused(now)

    def _refused(self, holder: LeaseRecord | None) -> FencedError:
        return FencedError(
            f"another run of this query ({self.query}) is under way: {holder or 'just started'}. "
            "This one wrote nothing. Let that run end, or stop it, and start again"
        )

    def _claim(self, previous: LeaseRecord | None) -> None:
        # The time is in it so that epochs rise even where the leases were deleted.
        epoch = max(previous.epoch + 1 if previous is not None else 1, int(time.time()))
        record = LeaseRecord(
            epoch,
            _machine(),
            os.getpid(),
            _started(os.getpid()),
            socket.gethostname(),
            time.time(),
        )
        content = orjson.dumps(asdict(record))
        if not self._staging.create(self._key(epoch), content):
            raise self._refused(self._newest())
        if self._staging.create(self._key(epoch), content):
            self._staging.delete(self._key(epoch))
            raise StagingError(
                "the staging location overwrites an object that was to be written only where there "
                "is none (If-None-Match, conditional writes): neither the lease of a query nor its "
                "micro-batches are safe there. Take another location, or a newer version of the "
                "object store"
            )
        epochs = self._epochs()
        if max(epochs) != epoch:
            raise self._refused(self._newest())
        for old in sorted(epochs)[:-1]:
            self._staging.delete(self._key(old))
        self._record, self._end = record, threading.Event()

    def _renew(self) -> None:
        while not self._end.wait(self._renewed_every):
            if not self.in_use():
                self.release()
            try:
                with self._lock:
                    record = self._record
                    if record is None or max(self._epochs(), default=0) != record.epoch:
                        return  # `check` says so to whoever wants to write
                    self._record = self._store(record, beat=record.beat + 1)
            except StagingError as error:
                _log.warning("the lease was not renewed: %s", error)

    def _store(self, record: LeaseRecord, **changes: Any) -> LeaseRecord:
        changed = replace(record, **changes)
        self._staging.replace(self._key(record.epoch), orjson.dumps(asdict(changed)))
        return changed

    def _key(self, epoch: int) -> str:
        return f"{self._prefix}/{epoch:012d}"

    def _epochs(self) -> list[int]:
        return self._staging.numbers(self._prefix)

    def _newest(self) -> LeaseRecord | None:
        for epoch in sorted(self._epochs(), reverse=True):
            try:
                return _decoded(self._staging.read(self._key(epoch)), self._key(epoch))
            except MissingObjectError:
                continue  # its successor has just deleted it
        return None


def delete_lease(location: str, query: str) -> None:
    """Delete the lease of a query that never runs again. Raises `StagingError`."""
    Staging(location, _prefix(query)).delete_all()


def _prefix(query: str) -> str:
    return f"{_FOLDER}/{hashlib.sha256(query.encode()).hexdigest()[:32]}"


_held: dict[str, QueryLease] = {}
"""The leases of this process."""


def _decoded(content: bytes, key: str) -> LeaseRecord:
    try:
        found = orjson.loads(content)
        if found["version"] > VERSION:
            raise StagingError(newer_format("the lease of this query", found["version"], VERSION))
        return LeaseRecord(**found)
    except (ValueError, TypeError, KeyError):
        raise StagingError(
            f"the lease {key} at the staging location is damaged: delete it when no run of the "
            "query is alive"
        ) from None


def _machine() -> str:
    """Return what tells this machine and its processes from others; nothing where that is unknown.

    Containers of one machine have process identifiers of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when the process began, in any unit; nothing where it ended, or that is unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]
