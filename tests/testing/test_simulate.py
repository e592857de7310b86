"""`simulate`: a wrong handler and a wrong store are found, and right ones pass."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from feedapi_client import Batch, MemoryCursorStore, Retry, SQLiteCursorStore
from feedapi_client.testing.simulator import SimulationError, simulate
from tests.simulation.backends import BACKENDS
from tests.testing.applications import (
    Rows,
    Rowset,
    applied,
    pairs,
    sqlite_store,
    transactional,
)

SLOW = pytest.mark.slow
SEEDS = 8

# ---------------------------------------------------------------------- handlers, right and wrong


def commits_before_its_effects(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    table = Rowset(store)

    async def handle(batch: Batch) -> None:
        await batch.commit()
        with closing(table.connect()) as database, database:
            table.add(database, pairs(batch))

    return handle


def writes_again(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    table = Rowset(store)

    async def handle(batch: Batch) -> None:
        with closing(table.connect()) as database, database:
            table.add(database, pairs(batch))

    return handle


def keeps_rows_in_memory(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    table, kept = Rowset(store), []

    async def handle(batch: Batch) -> None:
        kept.extend(pairs(batch))
        if len(kept) >= 10:
            with closing(table.connect()) as database, database:
                table.add(database, kept)
            kept.clear()

    return handle


def remembers_what_it_has_seen(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    """Repetitions are left out by what this process has seen. The next one has seen nothing."""
    table, seen = Rowset(store), set()

    async def handle(batch: Batch) -> None:
        new = [pair for pair in pairs(batch) if pair not in seen]
        with closing(table.connect()) as database, database:
            table.add(database, new)
        seen.update(new)

    return handle


def forgets_its_transaction(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    table = Rowset(store)

    async def handle(batch: Batch) -> None:
        with closing(table.connect()) as database:
            table.add(database, pairs(batch))
            await batch.commit(transaction=database)

    return handle


def mixes_events(store: SQLiteCursorStore) -> Callable[[Batch], Awaitable[None]]:
    table = Rowset(store)

    async def handle(batch: Batch) -> None:
        with closing(table.connect()) as database, database:
            table.add(database, sorted(pairs(batch), reverse=True))
            await batch.commit(transaction=database)

    return handle


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handler_with_one_transaction_is_exactly_once(backend: Any) -> None:
    simulate(transactional, sqlite_store, applied=applied, seeds=SEEDS, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_effects_before_the_commit_are_at_least_once(backend: Any) -> None:
    simulate(
        writes_again,
        sqlite_store,
        applied=applied,
        delivery="at-least-once",
        seeds=SEEDS,
        backend=backend,
    )


@pytest.mark.parametrize(
    ("handler", "rules", "backend"),
    [
        pytest.param(commits_before_its_effects, "lost", "asyncio", marks=SLOW),
        (writes_again, "exactly-once", "asyncio"),
        pytest.param(keeps_rows_in_memory, "lost exactly-once", "asyncio", marks=SLOW),
        pytest.param(remembers_what_it_has_seen, "exactly-once", "asyncio", marks=SLOW),
        pytest.param(forgets_its_transaction, "lost", "trio", marks=SLOW),
        pytest.param(mixes_events, "order", "asyncio", marks=SLOW),
    ],
)
def test_a_wrong_handler_is_found(handler: Any, rules: str, backend: Any) -> None:
    with pytest.raises(SimulationError) as found:
        simulate(handler, sqlite_store, applied=applied, backend=backend)
    assert found.value.rule in rules.split()
    assert len(found.value.scenario.steps) <= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_is_a_handler_and_a_store_in_memory(backend: Any) -> None:
    handled = 0

    async def handle(batch: Batch) -> None:
        nonlocal handled
        await anyio.sleep(0.01)
        handled += len(batch.events)

    simulate(handle, seeds=5, backend=backend)
    assert handled > 0


class Counter:
    """A handler that adds up: the number of events of each entity."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    async def __call__(self, batch: Batch) -> None:
        for entity, _ in pairs(batch):
            self.counts[entity] = self.counts.get(entity, 0) + 1


@SLOW
def test_a_handler_that_adds_up_is_found_to_count_twice() -> None:
    counter = Counter()

    def store(_: Path) -> MemoryCursorStore:
        counter.counts.clear()
        return MemoryCursorStore()

    with pytest.raises(SimulationError, match=r"took effect as event \d+ of \d+"):
        simulate(counter, store, applied=lambda _: counter.counts)


def test_the_handler_gets_payloads_of_its_own_shape() -> None:
    names = set()

    async def handle(batch: Batch) -> None:
        names.update(event.json()["customer"] for event in batch.events)

    simulate(handle, event=lambda entity, n: {"customer": f"c{entity}", "amount": n}, seeds=3)
    assert "c0" in names


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_may_open_and_close_what_it_needs(backend: Any) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def start(_: Any) -> AsyncIterator[Callable[[Batch], Awaitable[None]]]:
        log.append("open")
        try:
            yield partial(_handle_in_a_thread, [])
        finally:
            log.append("close")

    simulate(start, seeds=4, backend=backend)
    assert log.count("open") == log.count("close") > 4


async def _handle_in_a_thread(kept: Rows, batch: Batch) -> None:
    await anyio.to_thread.run_sync(kept.extend, pairs(batch))


def test_applied_may_be_asynchronous() -> None:
    async def slowly(store: SQLiteCursorStore) -> Rows:
        return await anyio.to_thread.run_sync(applied, store)

    simulate(transactional, sqlite_store, applied=slowly, seeds=3)


def test_an_error_of_the_handler_is_found_and_chained() -> None:
    async def handle(batch: Batch) -> None:
        if len(batch.events) > 3:
            raise ZeroDivisionError("more than three")

    with pytest.raises(SimulationError, match="ZeroDivisionError: more than three") as found:
        simulate(handle)
    assert isinstance(found.value.__cause__, ZeroDivisionError)


def test_a_handler_that_is_called_again_may_fail_at_first() -> None:
    failed: set[str] = set()

    async def handle(batch: Batch) -> None:
        if batch.cursor not in failed:
            failed.add(batch.cursor)
            raise ZeroDivisionError

    simulate(handle, seeds=5, on_failure=Retry(attempts=2))


@SLOW
def test_a_handler_that_goes_on_after_its_process_was_killed_has_no_effect() -> None:
    """`Killed` is no `Exception`: what handles errors does not run in a process that is gone."""
    caught: list[BaseException] = []

    async def handle(batch: Batch) -> None:
        try:
            await batch.commit()
        except Exception as error:
            caught.append(error)
            raise

    simulate(handle, seeds=5 * SEEDS)  # few are killed while they commit
    # A store that loses its connection, or hangs, is all that a handler may hear of.
    store_failures = ("ConnectionLostError", "Limits.commit_timeout")
    assert caught
    assert all(any(text in repr(error) for text in store_failures) for error in caught)


# ---------------------------------------------------------------------- what a failure says


@pytest.mark.slow
def test_a_failure_tells_its_history_and_how_to_repeat_it() -> None:
    with pytest.raises(SimulationError) as found:
        simulate(commits_before_its_effects, sqlite_store, applied=applied)
    error = found.value
    text = str(error)
    assert text.startswith(f"seed {error.seed} on asyncio: lost: event ")
    assert re.search(r"\n  \d\. at \d+\.\d{3} s publish\(count=\d+, entities=\d+\)", text)
    assert re.search(r"\n  \d\. at .*(kill|life)\(", text)
    assert f"Repeat it: simulate(..., first={error.seed}, seeds=1, backend='asyncio')" in text
    assert "violated: lost" in text
    with pytest.raises(SimulationError) as again:
        simulate(
            commits_before_its_effects, sqlite_store, applied=applied, first=error.seed, seeds=1
        )
    assert str(again.value) == text


# ---------------------------------------------------------------------- the fixture


TEST_FILE = """
async def handle(batch):
    if len(batch.events) > 3:
        raise ZeroDivisionError

def test_handler(simulate):
    simulate(handle)
"""


@pytest.mark.slow
def test_the_fixture_names_the_command_that_repeats_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST_FILE)
    failed = _pytest(tmp_path, "test_it.py")
    assert "Repeat it: pytest 'test_it.py::test_handler' --feedapi-seed " in failed
    seed = failed.partition("::test_handler' --feedapi-seed ")[2].split()[0]
    assert f"seed {seed} on asyncio" in _pytest(tmp_path, "test_it.py", "--feedapi-seed", seed)


def _pytest(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stdout
    return done.stdout
