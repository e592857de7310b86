"""`SQLiteCursorStore`: the contracts, the caller's own transaction, and the file."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.operations.opening import open_store
from feedapi_client.quarantine import SQLiteQuarantineStore
from feedapi_client.stores.sqlite import SQLiteCursorStore
from feedapi_client.testing.contracts import (
    advanced,
    opening,
)
from tests.positions import counted

pytestmark = pytest.mark.anyio
FEED = FeedKey("https://service.test/feed")
TRIGGER = (
    "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors WHEN NEW.partition_id = 5 "
    "BEGIN SELECT RAISE(FAIL, 'disk on fire'); END"
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteCursorStore]:
    async with SQLiteCursorStore(tmp_path / "app.db") as store:
        yield store


@pytest.fixture
def application(store: SQLiteCursorStore) -> sqlite3.Connection:
    connection = sqlite3.connect(store.path)
    connection.execute("CREATE TABLE effects (n INTEGER)")
    connection.commit()
    return connection


# The caller's transaction


async def test_a_failed_save_leaves_nothing_of_itself_in_the_transaction(
    store: SQLiteCursorStore, application: sqlite3.Connection
) -> None:
    await store.load(FEED)
    application.execute(TRIGGER.format("INSERT"))
    application.commit()
    application.execute("INSERT INTO effects VALUES (1)")
    with pytest.raises(StoreError, match="disk on fire"):
        await store.save(FEED, opening(range(10)), transaction=application)
    application.commit()
    assert await store.load(FEED) == {}
    application.close()


async def test_a_connection_in_autocommit_mode_may_begin_by_itself(
    store: SQLiteCursorStore, application: sqlite3.Connection
) -> None:
    application.isolation_level = None
    application.execute("BEGIN")
    await store.save(FEED, opening(), transaction=application)
    application.execute("ROLLBACK")
    assert await store.load(FEED) == {}
    application.close()


async def test_a_connection_is_to_the_stores_own_file_by_whatever_path(
    store: SQLiteCursorStore, tmp_path: Path
) -> None:
    """The file is made on first use, which may be the caller's transaction."""
    os.symlink(store.path, tmp_path / "link.db")
    for other in (tmp_path / "other.db", ":memory:"):
        with (
            closing(sqlite3.connect(other)) as connection,
            pytest.raises(StoreError, match="use one file for both"),
        ):
            await store.save(FEED, opening(), transaction=connection)
    with closing(sqlite3.connect(tmp_path / "link.db")) as connection:
        await store.save(FEED, opening(), transaction=connection)
        connection.commit()
    assert await store.load(FEED) == opening()


async def test_a_save_that_opens_the_transaction_waits_for_another_writer(
    store: SQLiteCursorStore,
) -> None:
    await store.save(FEED, opening())
    writer = sqlite3.connect(store.path)
    await store.save(FEED, advanced(opening(), "first"), transaction=writer)
    statements: list[str] = []
    begun = threading.Event()

    def note(statement: str) -> None:
        statements.append(statement)
        if statement.startswith("BEGIN"):
            begun.set()

    def save_too() -> None:
        connection = sqlite3.connect(store.path, timeout=60)
        connection.set_trace_callback(note)
        with closing(connection), pytest.raises(FencedError):
            anyio.run(lambda: store.save(FEED, advanced(opening(), "late"), transaction=connection))

    with ThreadPoolExecutor(1) as elsewhere:
        saved = elsewhere.submit(save_too)
        await anyio.to_thread.run_sync(begun.wait)
        assert not any(statement.startswith("SELECT") for statement in statements)
        writer.commit()
        await anyio.to_thread.run_sync(saved.result)
    writer.close()
    assert await store.load(FEED) == advanced(opening(), "first")


# The file


async def test_a_closed_store_opens_again(store: SQLiteCursorStore) -> None:
    await store.save(FEED, opening())
    await store.aclose()
    await store.aclose()
    assert await store.load(FEED) == opening()


def _of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE feedapi_cursors (a, b)")


FILES = {
    "text": (lambda path: path.write_bytes(b"this is no database" * 100), "is not a database"),
    "damaged": (lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096), "failed: "),
    "of another program": (_of_another_program, "no such column"),
    "no folder": (lambda path: path.parent.rmdir(), "unable to open database file: there is no"),
}


@pytest.mark.parametrize("kind", FILES)
async def test_a_file_that_is_none_of_ours_is_a_store_error(tmp_path: Path, kind: str) -> None:
    make, says = FILES[kind]
    path = tmp_path / "folder" / "cursors.db"
    path.parent.mkdir()
    make(path)
    async with SQLiteCursorStore(path) as store:
        with pytest.raises(StoreError, match=says) as failed:
            await store.load(FEED)
        assert isinstance(failed.value.__cause__, sqlite3.Error)
    if kind == "text":
        assert path.read_bytes() == b"this is no database" * 100


async def test_a_file_damaged_in_the_middle_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "cursors.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(FEED, opening(range(5_000)))
    damaged = bytearray(path.read_bytes())
    damaged[8192:] = b"\x5a" * (len(damaged) - 8192)
    path.write_bytes(damaged)
    async with SQLiteCursorStore(path) as store:
        with pytest.raises(StoreError, match="malformed"):
            await store.load(FEED)


@pytest.mark.parametrize(
    ("column", "text", "says"),
    [("status", "paused", r"partition 0: .*'paused'"), ("filters", "no JSON", "can't be read")],
)
async def test_what_another_program_wrote_is_a_store_error(
    store: SQLiteCursorStore, column: str, text: str, says: str
) -> None:
    await store.save(FEED, opening())
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute(f"UPDATE feedapi_cursors SET {column} = ?", (text,))
    with pytest.raises(StoreError, match=says):
        await (store.load(FEED) if column == "status" else store.feeds())


async def test_a_writer_that_holds_the_file_too_long_is_a_store_error(tmp_path: Path) -> None:
    async with SQLiteCursorStore(tmp_path / "cursors.db", busy_timeout=0.05) as store:
        await store.load(FEED)
        connection = sqlite3.connect(store.path)
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            await store.save(FEED, opening())
        connection.rollback()
        connection.close()
        await store.save(FEED, opening())


# Several processes


def _consume(path: str, start: object, results: object) -> None:
    async def consume() -> int:
        saved = 0
        async with SQLiteCursorStore(path) as store:
            start.wait()  # type: ignore[attr-defined]
            for revision in range(1, 31):
                try:
                    await store.save(FEED, {0: counted(str(os.getpid()), revision)})
                    saved += 1
                except FencedError:
                    while (
                        len(await store.load(FEED)) == 0
                        or (await store.load(FEED))[0].revision < revision
                    ):
                        await anyio.lowlevel.checkpoint()
        return saved

    results.put(anyio.run(consume))  # type: ignore[attr-defined]


def test_r17_of_several_processes_each_revision_is_saved_by_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_consume, args=(str(tmp_path / "cursors.db"), start, results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 30
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """The factory of Python's own documentation."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("row_factory", [None, as_dict, sqlite3.Row])
@pytest.mark.parametrize("text_factory", [str, bytes])
async def test_the_callers_connection_may_have_factories_of_its_own(
    tmp_path: Path, row_factory: Any, text_factory: Any
) -> None:
    feed, path = FeedKey("http://feed/feed", "default"), tmp_path / "app.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(feed, {0: Position("a")})
        with closing(sqlite3.connect(path)) as connection:
            connection.row_factory, connection.text_factory = row_factory, text_factory
            await store.save(feed, {0: counted("b", 2)}, transaction=connection)
            connection.commit()
        assert (await store.load(feed))[0] == counted("b", 2)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_replaced_or_deleted_in_use_is_an_error(
    tmp_path: Path, replaced: bool
) -> None:
    feed, path = FeedKey("http://feed/feed", "default"), tmp_path / "app.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(feed, {0: Position("a")})
        path.rename(tmp_path / "gone.db")
        if replaced:
            sqlite3.connect(path).close()
            path.touch()
        with pytest.raises(StoreError, match="was replaced or deleted while it was in use"):
            await store.save(feed, {0: counted("b", 2)})


def rights_in(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_r19_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Also one that a URL of SQLAlchemy names."""
    before = os.umask(0o022)
    try:
        async with (
            SQLiteCursorStore(tmp_path / "cursors.db") as store,
            open_store(f"sqlite+aiosqlite:///{tmp_path}/url.db", create=True),
        ):
            await store.save(FEED, {0: Position("1")})
            await SQLiteQuarantineStore(tmp_path / "quarantine.db").prepare()
            rights = rights_in(tmp_path)
    finally:
        os.umask(before)
    made = {"cursors.db", "cursors.db-wal", "cursors.db-shm", "quarantine.db", "url.db"}
    assert made <= rights.keys()
    assert set(rights.values()) == {0o600}
