"""A process that serves a feed with the published Go library, and changes as it is told.

It has the methods of `feedapi_client.testing.Publisher` that the deployments use.
"""

from __future__ import annotations

import json
import subprocess
import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from tests import components

Empty = Literal["echo", "own", "silent"]
"""What an empty page holds: the cursor asked with, a cursor of its own, or nothing."""


class GoPublisher:
    """One process, while it is entered. May be told from any thread.

    Arguments:
        partitions: how many there are at first.
        dialect: "v1" or "v2-token".
        token: of the discovery; it changes with the topology, unless `keep_token`.
        empty: what an empty page holds.
        checkpoint_every: events between two checkpoints.
    """

    def __init__(
        self,
        partitions: int = 2,
        *,
        dialect: Literal["v1", "v2-token"] = "v2-token",
        token: str = "t1",
        keep_token: bool = False,
        empty: Empty = "own",
        checkpoint_every: int = 10,
    ) -> None:
        self.token = token
        self._keep_token = keep_token
        self._dialect = dialect
        self._partitions: dict[int, dict[str, Any]] = {
            id: {"id": str(id)} for id in range(partitions)
        }
        self._logs: dict[int, list[Any]] = {id: [] for id in range(partitions)}
        self._sent: dict[int, int] = {}
        """How many events of each partition the process has, also of those that are gone."""
        self._count = partitions
        self._children: dict[int, Sequence[int]] = {}
        self._settings = {"empty": empty, "checkpointEvery": checkpoint_every}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.url: str | None = None

    # ------------------------------------------------------------------ the process

    def serve(self) -> Self:
        """Return itself, to be entered: with or without async."""
        return self

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            [components.require("feedapi-go")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.tell(dialect=self._dialect, **self._settings)
        self.restart()
        return self.url

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.communicate("")  # the end of its input ends it
        self._process = None

    async def __aenter__(self) -> str:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()

    def tell(self, **command: Any) -> None:
        """Send a command, and wait until it is carried out."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        assert answer == "ok", answer

    # ------------------------------------------------------------------ what it serves

    def info(self) -> dict[str, Any]:
        """What its discovery says."""
        return {"token": self.token, "partitions": [*self._partitions.values()]}

    def restart(self, *, stale: bool = False) -> None:
        """Serve the present topology.

        `stale`: only its discovery does. Its fetches keep the token and partitions that they began
        with, as those of the Go library do until the process starts anew.
        """
        self.tell(info=self.info(), restart=not stale)

    def extend(self, partition: int, events: Iterable[Any]) -> None:
        """Append events to a partition. None takes a place and is not sent."""
        added = list(events)
        self._logs[partition] += added
        self._sent[partition] = len(self._logs[partition])
        self.tell(partition=partition, events=added)

    def publish(self, entity: str, payload: Any) -> None:
        """Append an event to the open partition of its entity."""
        self.extend(self.partition_of(entity), [payload])

    def partition_of(self, entity: str) -> int:
        """Return the open partition that holds an entity."""
        id = zlib.crc32(entity.encode()) % self._count
        while id in self._children:
            children = self._children[id]
            id = children[zlib.crc32(f"{id} {entity}".encode()) % len(children)]
        return id

    def payloads(self) -> list[Any]:
        """Return everything that was published, each event once."""
        return [payload for log in self._logs.values() for payload in log if payload is not None]

    # ------------------------------------------------------------------ its topology

    def split(
        self,
        parent: int,
        children: Sequence[int],
        *,
        method: Literal["starts-after", "cursor-from"] = "starts-after",
    ) -> None:
        """Replace a partition by others.

        The library leaves `startsAfterPartition` out where it is 0, and never has a `lastCursor`.
        """
        log, self._children[parent] = self._logs[parent], children
        if method == "starts-after":
            self._partitions[parent]["closed"] = True
            added = {id: {"id": str(id), "startsAfterPartition": parent} for id in children}
            self._add(added, {id: [] for id in children})
            return
        del self._partitions[parent]
        added = {id: {"id": str(id), "cursorFromPartitions": [parent]} for id in children}
        # A child's log has the parent's places, so that the parent's cursors hold in it.
        homes = [self.partition_of(event["entity"]) if event else None for event in log]
        del self._logs[parent]
        logs = {
            id: [event if home == id else None for event, home in zip(log, homes, strict=True)]
            for id in children
        }
        self._add(added, logs)

    def renumber(self, old: int, new: int) -> None:
        """Serve an open partition under another id, whose cursors are the same.

        First that is a split by cursor transfer into one. To an id that was replaced before it is
        the publisher's way back.
        """
        back = self._children.get(new) == (old,)
        log = self._logs.pop(old)
        del self._partitions[old]
        if back:
            del self._children[new]
            self._add({new: {"id": str(new)}}, {new: log})
            return
        self._children[old] = (new,)
        self._add({new: {"id": str(new), "cursorFromPartitions": [old]}}, {new: log})

    def _add(self, partitions: dict[int, dict[str, Any]], logs: dict[int, list[Any]]) -> None:
        self._partitions |= partitions
        for id, log in logs.items():
            known = self._sent.get(id, 0)  # by a process that served it before
            self._logs[id] = log[:known]
            self.extend(id, log[known:])
        if not self._keep_token:
            self.token += "+"
        self.restart()
