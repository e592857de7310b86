"""Quarantine stores: records, and what only a file does."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import MemoryCursorStore, SQLiteCursorStore, StoreError
from feedapi_client.quarantine import SQLiteQuarantineStore, quarantine_beside
from tests.positions import counted
from tests.quarantine.helpers import FEED, kept, record

pytestmark = pytest.mark.anyio


async def test_an_event_is_quarantined_although_its_error_has_no_text() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert record(error=SilentError()).error == ""


async def test_the_quarantine_beside_a_memory_store_is_always_the_same() -> None:
    cursors, put = MemoryCursorStore(), record()
    await quarantine_beside(cursors).add([put])
    assert await kept(quarantine_beside(cursors)) == [put]
    assert await kept(quarantine_beside(MemoryCursorStore())) == []


# The file


async def test_a_file_that_is_no_database_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="quarantine in"):
        await SQLiteQuarantineStore(tmp_path / "a.db").prepare()


async def test_tasks_that_quarantine_into_one_file_wait_for_each_other_and_for_handlers(
    tmp_path: Path,
) -> None:
    """A handler that uses `sqlite3` in the event loop's thread waits for no lock of ours."""
    path = tmp_path / "a.db"
    cursors, store, over = SQLiteCursorStore(path), SQLiteQuarantineStore(path), False
    await store.prepare()

    async def work(partition: int) -> None:
        for revision in range(1, 6):
            events = [record(partition=partition, index=revision)]
            with_events = store.along(cursors, events)
            position = counted("c", revision)
            await cursors.save(FEED, {partition: position}, transaction=with_events)

    async def write_without_waiting() -> None:
        with closing(sqlite3.connect(path, timeout=5, isolation_level=None)) as connection:
            connection.execute("CREATE TABLE effects (n INTEGER)")
            while not over:
                connection.execute("INSERT INTO effects VALUES (1)")
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as others:
        others.start_soon(write_without_waiting)
        async with anyio.create_task_group() as tasks:
            for partition in range(8):
                tasks.start_soon(work, partition)
        over = True
    assert len(await kept(store)) == 40
    assert await cursors.load(FEED) == dict.fromkeys(range(8), counted("c", 5))
    await store.aclose()
    await cursors.aclose()


async def test_another_programs_lock_is_waited_for_beside_the_event_loop(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db")
    await store.prepare()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.add, [record(index=0)])
            tasks.start_soon(store.add, [record(index=1)])
            await anyio.sleep(0.2)  # the loop goes on
            other.execute("COMMIT")
    assert len(await kept(store)) == 2
    await store.aclose()


async def test_a_lock_that_is_not_freed_is_an_error(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db", busy_timeout=0.05)
    await store.prepare()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            await store.add([record()])
    await store.aclose()
