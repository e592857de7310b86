"""Drivers die, overlap and wake up late at each write of a micro-batch to folders of files.

Without a JVM: what an attempt wrote is two files that name it. Readers see each micro-batch once in
all tables, of the same attempt.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from feedapi_client.spark.ingest import Ingest, IngestError, parquet_table
from feedapi_client.spark.ingest.ingest_table import Identity
from feedapi_client.spark.ingest.parquet_table import (
    Decision,
    Decisions,
    ParquetTable,
    WrittenFiles,
)

WHO = Identity("feed", "query")
ROLES = ("output", "bronze")
PARTS = ("part-0", "part-1")


class CrashError(Exception):
    """The driver died."""


class Lake:
    """The folders of two tables. `at_write` is called before each write to them."""

    at_write: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, kind: str, folder: Path, batches: int) -> None:
        self._batches = range(batches)
        self.stores: dict[str, Any] = {}
        for role in ROLES:
            (folder / role).mkdir(parents=True)
            self.stores[role] = LocalStore(folder / role) if kind == "local" else MemoryStore()
        places = {role: f"{'s3:/' if kind == 'store' else ''}{folder}/{role}" for role in ROLES}
        self._job = Ingest(url="http://x/feed", schema="n INT", **places)
        self._attempts = itertools.count()

    def decisions(self) -> Decisions:
        return Decisions({role: ParquetTable(self._job, role) for role in ROLES}, WHO)

    def drive(self) -> None:
        """Write all micro-batches, as each driver of the query does."""
        decisions = self.decisions()
        for number in self._batches:
            decision = decisions.find(number)
            if decision is None:
                decision = decisions.decide(number, Decision(self._written(number)))
            decisions.publish(number, decision)

    def _written(self, number: int) -> list[WrittenFiles]:
        name = str(next(self._attempts))
        attempt = f"_feedapi/attempts/query/{number}/{name}"
        for role, part in itertools.product(ROLES, PARTS):
            Lake.at_write()
            obstore.put(self.stores[role], f"{attempt}/{part}", name.encode())
        return [WrittenFiles(role, attempt, f"feed/{number}") for role in ROLES]

    def files(self) -> dict[str, bytes]:
        return {
            f"{role}/{entry['path']}": bytes(obstore.get(store, entry["path"]).bytes())
            for role, store in self.stores.items()
            for page in obstore.list(store)
            for entry in page
        }

    def seen(self) -> dict[str, bytes]:
        """Return the files that readers see, and the attempts that they are of."""
        return {path: name for path, name in self.files().items() if "/_feedapi/" not in path}

    def check(self) -> int:
        """Return how many micro-batches readers see: each is whole, and of one attempt."""
        found: dict[str, list[bytes]] = defaultdict(list)
        for path, name in self.seen().items():
            found[path.split("/")[2]].append(name)
        for names in found.values():
            assert len(names) == len(ROLES) * len(PARTS)
            assert len(set(names)) == 1
        return len(found)


def drive(lake: Lake, point: int, act: Callable[[], object]) -> bool:
    """Drive, and act before the write of that number. Return whether there is one."""
    writes, acted = itertools.count(), False

    def at_write() -> None:
        nonlocal acted
        if next(writes) == point:
            acted = True
            Lake.at_write = staticmethod(lambda: None)
            act()
            Lake.at_write = staticmethod(at_write)

    Lake.at_write = staticmethod(at_write)
    try:
        with suppress(CrashError):
            lake.drive()
    finally:
        Lake.at_write = staticmethod(lambda: None)
    return acted


def die() -> None:
    raise CrashError


@pytest.fixture(params=["local", "store"])
def lakes(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Lake]:
    """Makes a lake."""
    kind: str = request.param
    numbers = itertools.count()
    stores: dict[str, Any] = {}

    def hook(owner: Any, name: str) -> None:
        write = getattr(owner, name)

        def hooked(*given: Any) -> Any:
            Lake.at_write()
            return write(*given)

        monkeypatch.setattr(owner, name, hooked)

    def make(batches: int) -> Lake:
        folder = tmp_path / str(next(numbers))
        lake = Lake(kind, folder, batches)
        stores.update({f"s3:/{folder}/{role}": lake.stores[role] for role in ROLES})
        return lake

    monkeypatch.setattr(parquet_table, "open_store", stores.__getitem__)
    folder = parquet_table._LocalFolder if kind == "local" else parquet_table._StoreFolder
    for name in ("create", "publish", "delete"):
        hook(folder, name)
    hook(obstore, "copy")
    return make


def test_r08_driver_dies_before_any_write(lakes: Callable[..., Lake]) -> None:
    for point in itertools.count():
        lake = lakes(batches=3)
        there = drive(lake, point, die)
        lake.drive()
        assert lake.check() == 3
        assert not [path for path in lake.files() if "/attempts/" in path]
        if not there:
            break
    assert point >= 30


def test_r08_driver_goes_on_late_beside_another_that_died(lakes: Callable[..., Lake]) -> None:
    for first, second in itertools.product(range(14), repeat=2):
        lake = lakes(batches=1)
        drive(lake, first, partial(drive, lake, second, die))
        lake.drive()
        assert lake.check() == 1


def test_r08_driver_goes_on_late_when_another_is_done(lakes: Callable[..., Lake]) -> None:
    for point in range(30):
        lake = lakes(batches=3)
        assert drive(lake, point, lake.drive)
        assert lake.check() == 3


def test_r09_query_shows_nothing_more_from_a_take_over_on(lakes: Callable[..., Lake]) -> None:
    def take_over(lake: Lake, seen: list[dict[str, bytes]]) -> None:
        for run in ("a run", "another"):
            lake.decisions().take_over(run)
        lake.check()
        seen.append(lake.seen())

    for point in range(30):
        lake = lakes(batches=3)
        seen: list[dict[str, bytes]] = []
        with suppress(IngestError):
            assert drive(lake, point, partial(take_over, lake, seen))
        assert [lake.seen()] == seen
