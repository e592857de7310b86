"""R11: ``feedapi cursors restore``, after a publisher was rolled back behind a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import pytest

from feedapi_client import FeedKey, Position, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.cli.conftest import Feedapi
from tests.positions import stand

STORED = {0: Position("60", "superseded", 3), 10: Position("80", "open", 4), 2: Position("7")}


@pytest.fixture
def publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    """It lists 0 and 1 as open, and 2 as closed."""
    publisher = feedapi_publisher_factory(3)
    publisher.close(2)
    return publisher


def key(publisher: Publisher) -> FeedKey:
    assert publisher.url is not None
    return FeedKey(publisher.url)


def positions(store: Path, publisher: Publisher) -> Mapping[int, Position]:
    async def load() -> Mapping[int, Position]:
        async with SQLiteCursorStore(store) as cursors:
            return await cursors.load(key(publisher))

    return anyio.run(load)


def save(store: Path, publisher: Publisher, stored: Mapping[int, Position]) -> None:
    async def replace() -> None:
        async with SQLiteCursorStore(store) as cursors:
            await cursors.replace(key(publisher), stored)

    anyio.run(replace)


def test_r11_restore_moves_the_cursor_back_in_one_save(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    save(store, publisher, STORED)
    result = feedapi("cursors", "restore", publisher.url, 0, "--store", store, "--yes")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"default @ {publisher.url}: partition 0 at '80', which partition 10 held\n"
    )
    assert stand(positions(store, publisher)) == {
        0: ("80", "open"),
        10: ("80", "superseded"),
        2: ("7", "open"),
    }
    again = feedapi("cursors", "restore", publisher.url, 0, "--store", store, "--yes")
    assert again.exit_code == 1
    assert "nothing to restore" in again.stderr


def test_r11_restore_asks_and_changes_nothing_without_an_answer(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    save(store, publisher, STORED)
    before = positions(store, publisher)
    result = feedapi("cursors", "restore", publisher.url, 0, "--store", store, input="n\n")
    assert "go on from the cursor '80', which partition 10 held?" in result.output
    assert result.exit_code != 0
    assert positions(store, publisher) == before


@pytest.mark.parametrize(
    ("stored", "arguments", "problem"),
    [
        ({**STORED, 11: Position("75")}, [0], "10 at '80', 11 at '75'"),
        ({**STORED, 1: Position("60", "superseded")}, [0], "partition 1 is listed as open again"),
        (STORED, [2], "lists it as closed"),
        (STORED, [7], "does not list it"),
        (STORED, [1], "has no stored position"),
        ({}, [0], "no cursor is stored"),
    ],
    ids=["different cursors", "several rolled back", "closed", "unlisted", "unknown", "empty"],
)
def test_r11_restore_refuses_what_is_not_certain(
    feedapi: Feedapi,
    publisher: Publisher,
    store: Path,
    stored: Mapping[int, Position],
    arguments: list[int],
    problem: str,
) -> None:
    save(store, publisher, stored)
    before = positions(store, publisher)
    result = feedapi("cursors", "restore", publisher.url, *arguments, "--store", store, "--yes")
    assert result.exit_code == 1
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert positions(store, publisher) == before


def test_r11_restore_takes_successors_and_a_cursor_by_hand(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    save(store, publisher, {**STORED, 11: Position("75"), 1: Position("60", "superseded")})
    options = ["--successor", "10", "--successor", "11", "--cursor", "75"]
    result = feedapi("cursors", "restore", publisher.url, 0, "--store", store, "--yes", *options)
    assert result.exit_code == 0, result.output
    found = stand(positions(store, publisher))
    assert found[0] == ("75", "open")
    assert (found[10][1], found[11][1]) == ("superseded", "superseded")
    bad = feedapi("cursors", "restore", publisher.url, 0, "--store", store, "--cursor", "ä")
    assert bad.exit_code == 2


def test_r11_restore_confirms_that_a_drained_partition_is_open_again(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    save(store, publisher, {0: Position("60", "drained"), 5: Position("8")})
    result = feedapi("cursors", "restore", publisher.url, 0, "--store", store, "--yes")
    assert result.exit_code == 0, result.output
    assert stand(positions(store, publisher)) == {0: ("60", "open"), 5: ("8", "open")}
