"""The suite that every cursor store passes: subclass it, and the tests run against your store.

Needs pytest and anyio's pytest plugin, which comes with anyio. A subclass, named ``Test...``, says what its store can do and how to get at it::

    class TestMyStore(CursorStoreContract):
        supports_transactions = True
        supports_second_handle = True
        supports_failure_injection = False

        @pytest.fixture
        async def store(self, tmp_path):
            async with MyStore(tmp_path / "db") as store:
                yield store

        @asynccontextmanager
        async def second_handle(self, store):
            async with MyStore(store.path) as second:
                yield second

        async def begin(self, store): ...
        async def commit(self, transaction): ...
        async def rollback(self, transaction): ...

All three capabilities must be declared: one that is not fails the tests that need it, and one declared False is replaced by a test that holds then, or
reported as skipped. Tests run on each backend of the fixture ``anyio_backend``; override it in the class for a store that knows only one.
"""

# ruff: noqa: D102 - the name of a test says what it shows

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FIRST, LAST, FeedKey, Position
from feedapi_client.stores.base import AdministrableStore, CursorStore

__all__ = ["AdministrableStoreContract", "CursorStoreContract"]

FEED = FeedKey("https://service.test/feed", "contract")
ALL_PARTITIONS = range(32_767)
CONSUMERS = 8

SPECIAL_TEXTS = {
    "empty": "",
    "special cursor": FIRST,
    "zero": "0",
    "null": "null",
    "spaces": "  a b\t ",
    "line ends": "a\nb\r\nc\n",
    "quotes": """it's "quoted" `back` \\ slash \\""",
    "sql": "'); DROP TABLE feedapi_cursors; --",
    "placeholders": "%s %(x)s ? :x $1 {x} @p",
    "json": '{"a": [1, "\\u0000", null]}',
    "separators": "a:b|c;d,e=f&g#h*i[j]k",
    "wide": "æøå ΑΒΓ 漢字 🎉 e\u0301 \u2028\u0085\ufeff",
    "all printable ASCII": "".join(map(chr, range(0x20, 0x7F))),
}


def opening(partitions: Iterable[int] = (0,), cursor: str = "c") -> dict[int, Position]:
    """First positions of partitions."""
    return {partition: Position(f"{cursor}{partition}") for partition in partitions}


def advanced(positions: Mapping[int, Position], cursor: str = "d") -> dict[int, Position]:
    """The positions after these."""
    return {
        partition: position.advance(f"{cursor}{partition}")
        for partition, position in positions.items()
    }


@pytest.mark.anyio
class CursorStoreContract:
    """What `CursorStore` promises, as tests. See the module for how to use it."""

    supports_transactions: bool
    """The store takes part in a caller's transaction: define `begin`, `commit` and `rollback`."""
    supports_second_handle: bool
    """Another store object, as in another process, can work on the same storage: define `second_handle`."""
    supports_failure_injection: bool
    """The storage can be made to fail: define `failing`."""

    # What a subclass gives

    @pytest.fixture
    def store(self) -> CursorStore:
        """A store without positions. To be defined by the subclass; may be an async fixture."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture store")

    def second_handle(self, store: Any) -> AbstractAsyncContextManager[CursorStore]:
        """Another store object on the storage of `store`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define second_handle, or declare supports_second_handle = False"
        )

    async def begin(self, store: Any) -> Any:
        """Begin a transaction as an application does, and return what `save` takes."""
        raise NotImplementedError(
            f"{type(self).__name__} must define begin, or declare supports_transactions = False"
        )

    async def commit(self, transaction: Any) -> None:
        """Commit what `begin` returned, and let go of it."""
        raise NotImplementedError(
            f"{type(self).__name__} must define commit, or declare supports_transactions = False"
        )

    async def rollback(self, transaction: Any) -> None:
        """Roll back what `begin` returned, and let go of it."""
        raise NotImplementedError(
            f"{type(self).__name__} must define rollback, or declare supports_transactions = False"
        )

    def failing(self, store: Any) -> AbstractAsyncContextManager[None]:
        """While it is entered, a save of the partitions 0 to 9 in the storage fails, if possible when it has written some of them."""
        raise NotImplementedError(
            f"{type(self).__name__} must define failing, or declare supports_failure_injection = False"
        )

    # Saving and loading

    async def test_load_of_a_feed_never_saved_is_empty(self, store: CursorStore) -> None:
        assert await store.load(FEED) == {}

    async def test_a_saved_position_is_loaded(self, store: CursorStore) -> None:
        await store.save(FEED, {7: Position("abc")})
        assert await store.load(FEED) == {7: Position("abc")}

    async def test_every_status_is_kept(self, store: CursorStore) -> None:
        positions = {
            0: Position("a", "open"),
            1: Position("b", "drained"),
            2: Position("c", "superseded"),
        }
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions

    async def test_a_status_changes_with_a_later_save(self, store: CursorStore) -> None:
        await store.save(FEED, {0: Position("a"), 1: Position("b")})
        later = {
            0: Position("a").advance(status="drained"),
            1: Position("b").advance(status="superseded"),
        }
        await store.save(FEED, later)
        assert await store.load(FEED) == later

    async def test_a_later_save_replaces_the_position(self, store: CursorStore) -> None:
        positions = opening()
        for number in range(5):
            await store.save(FEED, positions)
            positions = advanced(positions, str(number))
        await store.save(FEED, positions)
        assert await store.load(FEED) == {0: Position("40", revision=6)}

    async def test_a_save_leaves_other_partitions_alone(self, store: CursorStore) -> None:
        positions = opening(range(5))
        await store.save(FEED, positions)
        later = advanced({2: positions[2]})
        await store.save(FEED, later)
        assert await store.load(FEED) == {**positions, **later}

    async def test_old_and_new_partitions_are_saved_together(self, store: CursorStore) -> None:
        parent = opening()
        await store.save(FEED, parent)
        split = {0: parent[0].advance(status="superseded"), 1: Position("c0"), 2: Position("c0")}
        await store.save(FEED, split)
        assert await store.load(FEED) == split

    async def test_a_save_of_nothing_changes_nothing(self, store: CursorStore) -> None:
        await store.save(FEED, {})
        assert await store.load(FEED) == {}

    async def test_partition_ids_at_both_ends(self, store: CursorStore) -> None:
        positions = opening((0, 32_767))
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions

    async def test_large_revisions(self, store: CursorStore) -> None:
        positions = opening()
        await store.save(FEED, positions)
        for _ in range(20):
            positions = advanced(positions)
            await store.save(FEED, positions)
        assert (await store.load(FEED))[0].revision == 21

    @pytest.mark.parametrize("cursor", SPECIAL_TEXTS.values(), ids=SPECIAL_TEXTS.keys())
    async def test_special_characters_in_a_cursor(self, store: CursorStore, cursor: str) -> None:
        await store.save(FEED, {0: Position(cursor), 1: Position(cursor)})
        await store.save(FEED, {0: Position(LAST, revision=2)})
        await store.save(FEED, {0: Position(cursor, revision=3), 1: Position(cursor, revision=2)})
        assert await store.load(FEED) == {
            0: Position(cursor, revision=3),
            1: Position(cursor, revision=2),
        }

    @pytest.mark.parametrize("text", SPECIAL_TEXTS.values(), ids=SPECIAL_TEXTS.keys())
    async def test_special_characters_in_names_and_filters(
        self, store: CursorStore, text: str
    ) -> None:
        feed = FeedKey("https://service.test/æ%20/feed", text, {text: text})
        await store.save(feed, opening())
        assert (await store.load(feed), await store.load(FEED)) == (opening(), {})

    @pytest.mark.parametrize("cursor", ["x" * 10_240, "漢🎉" * 5_120], ids=["ASCII", "wide"])
    async def test_cursors_of_10_kilobytes(self, store: CursorStore, cursor: str) -> None:
        positions = {partition: Position(f"{cursor}{partition}") for partition in range(20)}
        await store.save(FEED, positions)
        await store.save(FEED, {3: positions[3].advance(cursor)})
        assert await store.load(FEED) == {**positions, 3: Position(cursor, revision=2)}

    async def test_all_partitions_in_one_save(self, store: CursorStore) -> None:
        positions = opening(ALL_PARTITIONS, "cursor-of-usual-length-")
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions
        later = advanced(positions, "another-cursor-of-usual-length-")
        await store.save(FEED, later)
        assert await store.load(FEED) == later

    async def test_one_stale_position_refuses_a_save_of_all_partitions(
        self, store: CursorStore
    ) -> None:
        positions = opening(ALL_PARTITIONS)
        await store.save(FEED, positions)
        winner = advanced({32_766: positions[32_766]}, "winner")
        await store.save(FEED, winner)
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, advanced(positions))
        assert refused.value.partition == 32_766
        assert await store.load(FEED) == {**positions, **winner}

    # Isolation

    @pytest.mark.parametrize(
        "other",
        [
            FeedKey("https://service.test/feed/", "contract"),
            FeedKey("https://service.test/FEED", "contract"),
            FeedKey("http://service.test/feed", "contract"),
            FeedKey("https://service.test:8443/feed", "contract"),
            FeedKey("https://service.test/feed?tenant=1", "contract"),
            FeedKey("https://service.test/feed", "Contract"),
            FeedKey("https://service.test/feed", "contract "),
            FeedKey("https://service.test/feed", "contract", {"filter-subject": "a"}),
        ],
        ids=str,
    )
    async def test_feeds_names_and_filters_are_apart(
        self, store: CursorStore, other: FeedKey
    ) -> None:
        await store.save(FEED, opening(cursor="mine"))
        assert await store.load(other) == {}
        await store.save(other, opening(cursor="other"))
        await store.save(other, advanced(opening(), "other"))
        assert await store.load(FEED) == opening(cursor="mine")

    async def test_filter_values_are_apart_and_their_order_does_not_matter(
        self, store: CursorStore
    ) -> None:
        first = FeedKey(FEED.url, FEED.name, {"filter-a": "1", "filter-b": "2"})
        same = FeedKey(FEED.url, FEED.name, {"filter-b": "2", "filter-a": "1"})
        other = FeedKey(FEED.url, FEED.name, {"filter-a": "2", "filter-b": "1"})
        await store.save(first, opening())
        assert (await store.load(same), await store.load(other)) == (opening(), {})

    # Fencing

    @pytest.mark.parametrize("revision", [1, 2, 3, 5, 100])
    async def test_r17_a_revision_that_is_not_the_next_is_refused(
        self, store: CursorStore, revision: int
    ) -> None:
        stored = {0: Position("c3", revision=3)}
        for number in (1, 2, 3):
            await store.save(FEED, {0: Position(f"c{number}", revision=number)})
        with pytest.raises(FencedError):
            await store.save(FEED, {0: Position("other", revision=revision)})
        assert await store.load(FEED) == stored

    async def test_r17_a_later_revision_on_nothing_is_refused(self, store: CursorStore) -> None:
        with pytest.raises(FencedError):
            await store.save(FEED, {0: Position("c", revision=2)})
        assert await store.load(FEED) == {}

    async def test_r17_the_same_position_saved_twice_is_refused(self, store: CursorStore) -> None:
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening())

    async def test_r17_the_error_names_feed_and_partition(self, store: CursorStore) -> None:
        await store.save(FEED, opening(range(3)))
        with pytest.raises(FencedError, match=r"partition 2: .*contract") as refused:
            await store.save(FEED, {**advanced(opening(range(2))), 2: Position("x")})
        assert (refused.value.feed, refused.value.partition) == (FEED.url, 2)

    @pytest.mark.parametrize("stale", [0, 4, 9])
    async def test_r17_one_stale_position_refuses_all(self, store: CursorStore, stale: int) -> None:
        positions = opening(range(10))
        await store.save(FEED, positions)
        winner = advanced({stale: positions[stale]}, "winner")
        await store.save(FEED, winner)
        with pytest.raises(FencedError):
            await store.save(FEED, {**advanced(positions), 10: Position("new")})
        assert await store.load(FEED) == {**positions, **winner}

    async def test_r17_a_partition_that_is_not_new_refuses_the_new_ones(
        self, store: CursorStore
    ) -> None:
        positions = opening((0, 5))
        await store.save(FEED, positions)
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, {**advanced({0: positions[0]}), **opening(range(1, 10))})
        assert refused.value.partition == 5
        assert await store.load(FEED) == positions

    async def test_the_store_works_on_after_a_refusal(self, store: CursorStore) -> None:
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, opening())
        await store.save(FEED, advanced(opening()))
        assert await store.load(FEED) == advanced(opening())

    # Several consumers

    async def test_r17_of_concurrent_consumers_one_advances(self, store: CursorStore) -> None:
        for revision in (1, 2, 3):
            results = await self._race(store, {0: revision})
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            assert await store.load(FEED) == {0: Position(_winner(results), revision=revision)}

    async def test_r17_of_concurrent_saves_of_many_positions_one_is_kept(
        self, store: CursorStore
    ) -> None:
        for revision in (1, 2, 3):
            results = await self._race(store, dict.fromkeys(range(50), revision))
            assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]
            assert await store.load(FEED) == {
                p: Position(_winner(results), revision=revision) for p in range(50)
            }

    async def test_concurrent_saves_of_different_partitions_are_all_kept(
        self, store: CursorStore
    ) -> None:
        async def consume(partition: int) -> None:
            for revision in range(1, 6):
                await store.save(FEED, {partition: Position(f"c{revision}", revision=revision)})

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, partition)
        assert await store.load(FEED) == {
            partition: Position("c5", revision=5) for partition in range(20)
        }

    async def test_concurrent_saves_of_different_feeds_are_all_kept(
        self, store: CursorStore
    ) -> None:
        feeds = [FeedKey(FEED.url, f"consumer {number}") for number in range(CONSUMERS)]
        async with anyio.create_task_group() as group:
            for feed in feeds:
                group.start_soon(store.save, feed, opening(range(5), feed.name))
        for feed in feeds:
            assert await store.load(feed) == opening(range(5), feed.name)

    async def _race(
        self, store: CursorStore, revisions: dict[int, int], second: CursorStore | None = None
    ) -> dict[str, str]:
        results: dict[str, str] = {}

        async def consume(name: str, handle: CursorStore) -> None:
            try:
                await handle.save(
                    FEED,
                    {
                        partition: Position(name, revision=revision)
                        for partition, revision in revisions.items()
                    },
                )
                results[name] = "saved"
            except FencedError:
                results[name] = "fenced"

        async with anyio.create_task_group() as group:
            for number in range(CONSUMERS):
                group.start_soon(
                    consume, f"consumer {number}", second if second and number % 2 else store
                )
        return results

    # A second handle

    def _need_second_handle(self) -> None:
        if not self._declared("supports_second_handle"):
            pytest.skip("the store declares supports_second_handle = False")

    async def test_a_second_handle_sees_what_the_first_saved(self, store: CursorStore) -> None:
        self._need_second_handle()
        await store.save(FEED, opening(range(3)))
        async with self.second_handle(store) as second:
            assert await second.load(FEED) == opening(range(3))
            await second.save(FEED, advanced(opening()))
        assert await store.load(FEED) == {**opening(range(3)), **advanced(opening())}

    async def test_r17_a_second_handle_fences_the_first(self, store: CursorStore) -> None:
        self._need_second_handle()
        await store.save(FEED, opening())
        async with self.second_handle(store) as second:
            await second.save(FEED, advanced(opening(), "second"))
            with pytest.raises(FencedError):
                await store.save(FEED, advanced(opening(), "first"))
            assert await second.load(FEED) == advanced(opening(), "second")

    async def test_r17_of_concurrent_consumers_on_two_handles_one_advances(
        self, store: CursorStore
    ) -> None:
        self._need_second_handle()
        async with self.second_handle(store) as second:
            for revision in (1, 2, 3):
                for partitions in ([0], list(range(1, 20))):
                    results = await self._race(store, dict.fromkeys(partitions, revision), second)
                    assert sorted(results.values()) == ["fenced"] * (CONSUMERS - 1) + ["saved"]

    # The caller's transaction

    def _need_transactions(self) -> None:
        if not self._declared("supports_transactions"):
            pytest.skip("the store declares supports_transactions = False")

    async def test_what_is_no_transaction_is_refused(self, store: CursorStore) -> None:
        with pytest.raises(StoreError):
            await store.save(FEED, opening(), transaction=object())
        assert await store.load(FEED) == {}

    async def test_r5_a_save_takes_effect_when_the_caller_commits(self, store: CursorStore) -> None:
        self._need_transactions()
        transaction = await self.begin(store)
        await store.save(FEED, opening(range(10)), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == opening(range(10))

    async def test_r5_a_rolled_back_save_leaves_nothing(self, store: CursorStore) -> None:
        self._need_transactions()
        for partitions in ([0], range(10)):
            transaction = await self.begin(store)
            await store.save(FEED, opening(partitions), transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == {}

    async def test_r5_after_a_rollback_the_same_position_is_saved_again(
        self, store: CursorStore
    ) -> None:
        self._need_transactions()
        positions = opening(range(3))
        await store.save(FEED, positions)
        later = advanced({1: positions[1]})
        for _ in range(3):
            transaction = await self.begin(store)
            await store.save(FEED, later, transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == positions
        transaction = await self.begin(store)
        await store.save(FEED, later, transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {**positions, **later}

    async def test_several_saves_in_one_transaction(self, store: CursorStore) -> None:
        self._need_transactions()
        positions = opening(range(3))
        transaction = await self.begin(store)
        await store.save(FEED, positions, transaction=transaction)
        await store.save(FEED, advanced(positions), transaction=transaction)
        await store.save(FEED, advanced(advanced({0: positions[0]})), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {
            **advanced(positions),
            **advanced(advanced({0: positions[0]})),
        }

    async def test_a_save_of_nothing_in_a_transaction(self, store: CursorStore) -> None:
        self._need_transactions()
        transaction = await self.begin(store)
        await store.save(FEED, {}, transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == {}

    @pytest.mark.parametrize("partitions", [[0], range(10)], ids=["one", "several"])
    async def test_r17_a_refused_save_leaves_a_transaction_that_rolls_back(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        self._need_transactions()
        positions = opening(partitions)
        await store.save(FEED, positions)
        winner = advanced({0: positions[0]}, "winner")
        await store.save(FEED, winner)
        for refused in (positions, advanced(positions)):
            transaction = await self.begin(store)
            with pytest.raises(FencedError):
                await store.save(FEED, refused, transaction=transaction)
            await self.rollback(transaction)
        await store.save(FEED, advanced(winner))
        assert await store.load(FEED) == {**positions, **advanced(winner)}

    async def test_all_partitions_in_one_transaction(self, store: CursorStore) -> None:
        self._need_transactions()
        positions = opening(ALL_PARTITIONS)
        for finish in (self.rollback, self.commit):
            transaction = await self.begin(store)
            await store.save(FEED, positions, transaction=transaction)
            await finish(transaction)
            assert await store.load(FEED) == ({} if finish == self.rollback else positions)

    async def test_cancellation_during_a_save_in_a_transaction(self, store: CursorStore) -> None:
        self._need_transactions()
        for delay in _cancellation_delays():
            transaction = await self.begin(store)
            with anyio.move_on_after(delay):
                await store.save(FEED, opening(range(2_000)), transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == {}
        await store.save(FEED, opening())

    # Failures and cancellation

    def _need_failures(self) -> None:
        if not self._declared("supports_failure_injection"):
            pytest.skip("the store declares supports_failure_injection = False")

    async def test_a_store_that_fails_in_the_middle_of_first_positions_keeps_none(
        self, store: CursorStore
    ) -> None:
        self._need_failures()
        async with self.failing(store):
            with pytest.raises(StoreError) as failed:
                await store.save(FEED, opening(range(10)))
        assert not isinstance(failed.value, FencedError)
        assert (failed.value.feed, failed.value.__cause__ is None) == (FEED.url, False)
        assert await store.load(FEED) == {}
        await store.save(FEED, opening(range(10)))

    async def test_a_store_that_fails_in_the_middle_of_later_positions_keeps_none(
        self, store: CursorStore
    ) -> None:
        self._need_failures()
        positions = opening(range(10))
        await store.save(FEED, positions)
        async with self.failing(store):
            with pytest.raises(StoreError) as failed:
                await store.save(FEED, {**advanced(positions), 10: Position("new")})
        assert not isinstance(failed.value, FencedError)
        assert await store.load(FEED) == positions
        await store.save(FEED, advanced(positions))
        assert await store.load(FEED) == advanced(positions)

    async def test_a_cancelled_save_has_saved_all_or_nothing(self, store: CursorStore) -> None:
        expected = opening(range(2_000))
        await store.save(FEED, expected)
        for delay in _cancellation_delays():
            later = advanced(expected)
            with anyio.move_on_after(delay):
                await store.save(FEED, later)
            found = await store.load(FEED)
            assert found in (expected, later)
            expected = found
        await store.save(FEED, advanced(expected))
        assert await store.load(FEED) == advanced(expected)

    async def test_a_save_cancelled_at_any_of_its_first_steps_has_saved_all_or_nothing(
        self, store: CursorStore
    ) -> None:
        expected = opening(range(10))
        await store.save(FEED, expected)
        for steps in range(20):
            later = advanced(expected)
            async with anyio.create_task_group() as group:
                group.start_soon(store.save, FEED, later)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            found = await store.load(FEED)
            assert found in (expected, later)
            expected = found

    async def test_a_cancelled_queue_of_saves_leaves_the_store_usable(
        self, store: CursorStore
    ) -> None:
        async def consume(partition: int) -> None:
            for revision in range(1, 1_000):
                await store.save(FEED, {partition: Position(f"c{revision}", revision=revision)})

        with anyio.move_on_after(0.1):
            async with anyio.create_task_group() as group:
                for partition in range(20):
                    group.start_soon(consume, partition)
        found = await store.load(FEED)
        assert all(position.cursor == f"c{position.revision}" for position in found.values())
        await store.save(FEED, advanced(found))
        assert await store.load(FEED) == advanced(found)

    def _declared(self, capability: str) -> bool:
        if not hasattr(self, capability):
            pytest.fail(f"{type(self).__name__} must declare {capability} = True or False")
        return bool(getattr(self, capability))


class AdministrableStoreContract(CursorStoreContract):
    """What `AdministrableStore` promises beyond that, as tests."""

    async def test_the_store_is_administrable(self, store: CursorStore) -> None:
        assert isinstance(store, AdministrableStore)

    async def test_feeds_lists_the_keys_that_were_saved(self, store: AdministrableStore) -> None:
        keys = [
            FeedKey("https://a.test/feed?tenant=1", text, {text: text, "filter-b": "2"})
            for text in SPECIAL_TEXTS.values()
        ]
        for key in keys:
            await store.save(key, opening(range(3)))
        found = await store.feeds()
        assert found == sorted(keys, key=str)
        assert {key.id for key in found} == {key.id for key in keys}

    async def test_feeds_of_an_empty_store(self, store: AdministrableStore) -> None:
        assert await store.feeds() == []

    async def test_deleted_positions_are_gone_and_others_stay(
        self, store: AdministrableStore
    ) -> None:
        other = FeedKey(FEED.url, "other")
        await store.save(FEED, opening(range(5)))
        await store.save(other, opening(range(5)))
        await store.delete(FEED, [1, 3, 99])
        assert await store.load(FEED) == opening((0, 2, 4))
        assert await store.load(other) == opening(range(5))

    async def test_a_deleted_feed_is_no_longer_listed(self, store: AdministrableStore) -> None:
        await store.save(FEED, opening(ALL_PARTITIONS))
        await store.delete(FEED)
        assert (await store.load(FEED), await store.feeds()) == ({}, [])

    async def test_a_feed_without_its_last_partition_is_no_longer_listed(
        self, store: AdministrableStore
    ) -> None:
        await store.save(FEED, opening(range(2)))
        await store.delete(FEED, [0, 1])
        assert (await store.load(FEED), await store.feeds()) == ({}, [])

    async def test_deleting_what_is_not_there_is_no_error(self, store: AdministrableStore) -> None:
        await store.delete(FEED)
        await store.delete(FEED, [1])
        await store.delete(FEED, [])
        assert await store.load(FEED) == {}

    async def test_r17_deleting_fences_a_running_consumer(self, store: AdministrableStore) -> None:
        await store.save(FEED, opening())
        await store.delete(FEED)
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(opening()))
        await store.save(FEED, opening(cursor="again"))

    async def test_replaced_positions_have_the_next_revisions(
        self, store: AdministrableStore
    ) -> None:
        await store.save(FEED, opening(range(3)))
        await store.save(FEED, advanced(opening()))
        replaced = await store.replace(
            FEED, {0: Position("x", "drained", 77), 1: Position("y"), 9: Position("z", revision=5)}
        )
        assert replaced == {
            0: Position("x", "drained", 3),
            1: Position("y", revision=2),
            9: Position("z"),
        }
        assert await store.load(FEED) == {**replaced, 2: opening((2,))[2]}

    async def test_r17_replacing_fences_a_running_consumer(self, store: AdministrableStore) -> None:
        await store.save(FEED, opening())
        await store.replace(FEED, opening(cursor="set"))
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(opening()))

    async def test_replacing_wins_against_a_running_consumer(
        self, store: AdministrableStore
    ) -> None:
        stopped: list[int] = []

        async def consume() -> None:
            positions = opening()
            try:
                while True:
                    await store.save(FEED, positions)
                    positions = advanced(positions)
                    await anyio.lowlevel.checkpoint()
            except FencedError:
                stopped.append(positions[0].revision)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            with anyio.fail_after(30):
                while not await store.load(FEED):
                    await anyio.lowlevel.checkpoint()
                replaced = await store.replace(FEED, {0: Position("set")})
        assert stopped == [replaced[0].revision]
        assert await store.load(FEED) == replaced

    async def test_replacing_all_partitions(self, store: AdministrableStore) -> None:
        await store.save(FEED, opening(range(10_000)))
        replaced = await store.replace(FEED, opening(ALL_PARTITIONS, "set"))
        assert await store.load(FEED) == replaced
        assert (replaced[0].revision, replaced[20_000].revision) == (2, 1)


def _winner(results: Mapping[str, str]) -> str:
    return next(name for name, result in results.items() if result == "saved")


def _cancellation_delays() -> list[float]:
    """From before the first step of a save to well after a fast one."""
    return [0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
