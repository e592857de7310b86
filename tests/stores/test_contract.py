"""The contract suite itself: a broken store fails it, and so does an undeclared capability."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import anyio.lowlevel
import pytest

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_replaces
from feedapi_client.stores.sqlite import MemoryCursorStore
from feedapi_client.testing import CursorStoreContract

pytestmark = pytest.mark.anyio
Positions = Mapping[int, Position]
CAPABILITIES = ("supports_transactions", "supports_second_handle", "supports_failure_injection")
OPTIONAL = [
    name
    for name, test in vars(CursorStoreContract).items()
    if name.startswith("test_") and "_need" in test.__code__.co_names
]


class AnyRevision(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        await self.replace(feed, positions)


class OneByOne(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        for partition, position in positions.items():
            await super().save(feed, {partition: position}, **more)


class IgnoresTheTransaction(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        await super().save(feed, positions)


class MixesFeeds(MemoryCursorStore):
    async def load(self, feed: FeedKey) -> dict[int, Position]:
        positions: dict[int, Position] = {}
        for each in await self.feeds():
            positions |= await super().load(each)
        return positions


def loading(change: Callable[[Position], Position]) -> type[MemoryCursorStore]:
    class Changes(MemoryCursorStore):
        async def load(self, feed: FeedKey) -> dict[int, Position]:
            return {p: change(found) for p, found in (await super().load(feed)).items()}

    return Changes


class EncodesCursors(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        for position in positions.values():
            position.cursor.encode()
        await super().save(feed, positions, **more)


class ChecksAndSavesSeparately(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        stored = await self.load(feed)
        for partition, position in positions.items():
            check_replaces(feed, partition, position.replaces, stored.get(partition))
        await anyio.lowlevel.checkpoint()
        await self.replace(feed, positions)


class CancelledHalfway(MemoryCursorStore):
    async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
        for odd in (1, 0):
            half = {p: each for p, each in positions.items() if p % 2 == odd}
            await super().save(feed, half, **more)
            await anyio.lowlevel.checkpoint()


BROKEN = {
    "test_r17_a_position_that_replaces_another_one_is_refused": AnyRevision,
    "test_r17_one_stale_position_refuses_all": OneByOne,
    "test_what_is_no_transaction_is_refused": IgnoresTheTransaction,
    "test_feeds_names_and_filters_are_apart": MixesFeeds,
    "test_every_status_is_kept": loading(lambda one: Position(one.cursor, "open", one.revision)),
    "test_special_characters_in_a_cursor": loading(
        lambda one: Position(one.cursor.strip(), one.status, one.revision)
    ),
    "test_r18_a_cursor_is_kept_as_it_is_or_refused_for_its_partition": EncodesCursors,
    "test_r17_of_concurrent_consumers_one_advances": ChecksAndSavesSeparately,
    "test_a_save_cancelled_at_any_time_has_saved_all_or_nothing": CancelledHalfway,
}


def cases(name: str) -> Iterator[dict[str, Any]]:
    """The arguments of a test of the contract, by its marks."""
    found = getattr(getattr(CursorStoreContract, name), "pytestmark", ())
    marks = [each.args for each in found if each.name == "parametrize"]
    for values in product(*(values for _, values in marks)):
        yield {argument: value for (argument, _), value in zip(marks, values, strict=True)}


async def run(name: str, make: type[MemoryCursorStore], declared: object = None) -> None:
    contract = CursorStoreContract()
    for capability in CAPABILITIES if declared is not None else ():
        setattr(contract, capability, declared)
    for case in cases(name):
        await getattr(contract, name)(store=make(), **case)


@pytest.mark.parametrize(("test", "broken"), BROKEN.items())
async def test_a_broken_store_fails(test: str, broken: type[MemoryCursorStore]) -> None:
    await run(test, MemoryCursorStore)
    with pytest.raises((Exception, pytest.fail.Exception)):
        await run(test, broken)


@pytest.mark.parametrize(
    ("declared", "outcome"),
    [
        (None, pytest.fail.Exception),
        (True, NotImplementedError),
        (False, pytest.skip.Exception),
    ],
    ids=["undeclared", "without its hook", "declared as missing"],
)
async def test_a_capability_is_declared_and_has_its_hook(
    declared: bool | None, outcome: type[BaseException]
) -> None:
    assert len(OPTIONAL) == 7
    for name in OPTIONAL:
        with pytest.raises(outcome, match="supports_"):
            await run(name, MemoryCursorStore, declared)


def test_the_stores_package_imports_no_extra() -> None:
    program = """
import sys
import feedapi_client.stores
drivers = {'sqlalchemy', 'redis', 'aiosqlite', 'psycopg', 'psycopg_pool', 'asyncpg'}
assert not drivers & set(sys.modules)
from feedapi_client import PostgresCursorStore
assert not drivers & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
