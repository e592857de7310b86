"""What a store of cursors promises, as tests."""

# ruff: noqa: ARG002 - a subclass defines the hooks

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any
from zlib import crc32

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FIRST, LAST, FeedKey, Position, Status
from feedapi_client.stores.base import CursorStore

FEED = FeedKey("https://service.test/feed", "contract")
ALL_PARTITIONS = range(32_768)
MANY = range(2_500)
"""Some times what a store saves with one statement. Saving all partitions takes seconds."""

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

# No publisher may send them, and some storages can't hold them.
UNUSUAL_CURSORS = ("a\0b", "\ud800")
CONSUMERS = 8
# From before the first step of a save to well after the end of a fast one.
CANCELLATION_DELAYS = (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
CANCELLATION_STEPS = range(20)

one_or_several = pytest.mark.parametrize("partitions", [[0], range(50)], ids=["one", "several"])


def following(before: Position | None, cursor: str, status: Status = "open") -> Position:
    """Return a position that replaces the one `before` it.

    As `Position.after` does, but cursor and status decide the step: tests can tell what comes next.
    """
    replaces = None if before is None else before.revision
    step = 1 + crc32(f"{status} {cursor}".encode(errors="surrogatepass")) % 2**20
    return Position(cursor, status, (replaces or 0) + step, replaces)


def opening(partitions: Iterable[int] = (0,), cursor: str = "c") -> dict[int, Position]:
    """Return the first positions of partitions."""
    return {partition: following(None, f"{cursor}{partition}") for partition in partitions}


def advanced(positions: Mapping[int, Position], cursor: str = "d") -> dict[int, Position]:
    """Return the positions that follow these."""
    return {
        partition: following(position, f"{cursor}{partition}")
        for partition, position in positions.items()
    }


@pytest.mark.anyio
class StoreContract:
    """The capabilities of a store, and the hooks that tests use to reach it."""

    supports_transactions: bool
    """The store takes part in a caller's transaction: define `begin`, `commit` and `rollback`."""
    supports_second_handle: bool
    """Another store object, as in another process, can work on the same storage.

    Define `second_handle`.
    """
    supports_failure_injection: bool
    """The storage can be made to fail: define `failing`."""

    @pytest.fixture
    def store(self) -> CursorStore:
        """Return a store without positions. May be an async fixture."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture store")

    def second_handle(self, store: Any) -> AbstractAsyncContextManager[CursorStore]:
        """Return another store object on the storage of `store`."""
        raise self._undefined("second_handle", "supports_second_handle")

    async def begin(self, store: Any) -> Any:
        """Begin a transaction as an application does, and return what `save` takes."""
        raise self._undefined("begin", "supports_transactions")

    async def commit(self, transaction: Any) -> None:
        """Commit what `begin` returned, and release it."""
        raise self._undefined("commit", "supports_transactions")

    async def rollback(self, transaction: Any) -> None:
        """Roll back what `begin` returned, and release it."""
        raise self._undefined("rollback", "supports_transactions")

    def failing(self, store: Any) -> AbstractAsyncContextManager[None]:
        """Return a context in which a save of the partitions 0 to 9 fails in the storage.

        If possible it fails after some of them were written.
        """
        raise self._undefined("failing", "supports_failure_injection")

    def _undefined(self, hook: str, capability: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} must define {hook}, or declare {capability} = False"
        )

    def _need(self, capability: str) -> None:
        """Skip the test when the store lacks a capability, fail it when that is not declared."""
        if not hasattr(self, capability):
            pytest.fail(f"{type(self).__name__} must declare {capability} = True or False")
        if not getattr(self, capability):
            pytest.skip(f"the store declares {capability} = False")


def _refused_cursor(error: StoreError, partition: int, cursor: str) -> None:
    assert not isinstance(error, FencedError), "no other consumer is to blame"
    assert error.partition == partition, "the error has to name the partition of the cursor"
    assert cursor not in str(error), "an error holds nothing that a publisher sent (R19)"


class CursorStoreContract(StoreContract):
    """What `CursorStore` promises, as tests."""

    # Saving and loading

    async def test_nothing_saved_is_nothing_loaded(self, store: CursorStore) -> None:
        assert await store.load(FEED) == {}
        await store.save(FEED, {})
        assert await store.load(FEED) == {}

    async def test_every_status_is_kept(self, store: CursorStore) -> None:
        """Partitions that are drained or superseded are not read again."""
        positions = {
            0: Position("a", "open"),
            1: Position("b", "drained"),
            2: Position("c", "superseded"),
        }
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions

    async def test_a_later_save_replaces_its_own_partitions_only(self, store: CursorStore) -> None:
        """New ones are saved together with them: a split is one save."""
        positions = opening(range(5))
        await store.save(FEED, positions)
        for number in range(3):
            later = {
                1: following(positions[1], str(number)),
                2: following(positions[2], positions[2].cursor, "drained"),
                3: following(positions[3], "x", "superseded"),
                10 + number: following(None, "new"),
            }
            await store.save(FEED, later)
            positions |= later
        assert await store.load(FEED) == positions

    async def test_large_revisions(self, store: CursorStore) -> None:
        """Revisions are integers up to 2**53 - 1: four bytes are too few."""
        replaces = None
        for revision in (2**20, 2**31, 2**32, 2**45, 2**53 - 1):
            position = Position("c", revision=revision, replaces=replaces)
            await store.save(FEED, {0: position})
            assert await store.load(FEED) == {0: position}
            replaces = revision

    async def test_special_characters_in_a_cursor(self, store: CursorStore) -> None:
        """A cursor is any text of a publisher, and comes back as it is."""
        texts = dict(enumerate(SPECIAL_TEXTS.values()))
        saves = [texts, dict.fromkeys(texts, LAST), texts, texts]
        for number, cursors in enumerate(saves, 1):
            await store.save(
                FEED,
                {p: Position(c, "open", number, number - 1 or None) for p, c in cursors.items()},
            )
            assert await store.load(FEED) == {
                p: Position(cursor, revision=number) for p, cursor in cursors.items()
            }

    @pytest.mark.parametrize("cursor", UNUSUAL_CURSORS)
    async def test_r18_a_cursor_is_kept_as_it_is_or_refused_for_its_partition(
        self, store: CursorStore, cursor: str
    ) -> None:
        """It is no error of a driver or an encoder, and what is refused saves nothing."""
        positions = opening(range(3))
        await store.save(FEED, positions)
        later = {1: following(positions[1], cursor), 2: following(positions[2], "usual")}
        try:
            await store.save(FEED, later)
        except StoreError as error:
            _refused_cursor(error, 1, cursor)
            later = {}
        assert await store.load(FEED) == positions | later
        await store.save(FEED, advanced(positions | later))

    async def test_cursors_of_10_kilobytes(self, store: CursorStore) -> None:
        """Publishers may send up to 16 KiB: a column for it has no shorter limit."""
        long = ["x" * 10_240, "漢🎉" * 5_120]
        positions = {p: Position(f"{long[p % 2]}{p}") for p in range(20)}
        await store.save(FEED, positions)
        later = {p: following(positions[p], cursor) for p, cursor in enumerate(long)}
        await store.save(FEED, later)
        assert await store.load(FEED) == positions | later

    async def test_all_partitions_in_one_save_which_one_stale_position_refuses(
        self, store: CursorStore
    ) -> None:
        """All ids at once are one step, however many statements that takes."""
        positions = opening(ALL_PARTITIONS, "cursor-of-usual-length-")
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions
        winner = advanced({32_766: positions[32_766]}, "winner")
        await store.save(FEED, winner)
        later = advanced(positions, "another-cursor-of-usual-length-")
        with pytest.raises(FencedError) as refused:
            await store.save(FEED, later)
        assert refused.value.partition == 32_766
        assert await store.load(FEED) == positions | winner
        del later[32_766]
        await store.save(FEED, later)
        assert await store.load(FEED) == later | winner

    async def test_feeds_names_and_filters_are_apart(self, store: CursorStore) -> None:
        """Keys that differ in anything, also in case or a space, have nothing in common."""
        filters = {"filter-a": "1", "filter-b": "2"}
        feeds = [
            FEED,
            FeedKey(f"{FEED.url}/", FEED.name),
            FeedKey("https://service.test/FEED", FEED.name),
            FeedKey("http://service.test/feed", FEED.name),
            FeedKey("https://service.test:8443/feed", FEED.name),
            FeedKey(f"{FEED.url}?tenant=1", FEED.name),
            FeedKey(FEED.url, "Contract"),
            FeedKey(FEED.url, "contract "),
            FeedKey(FEED.url, FEED.name, filters),
            FeedKey(FEED.url, FEED.name, {"filter-a": "2", "filter-b": "1"}),
            *(
                FeedKey("https://service.test/æ%20/feed", text, {text: text})
                for text in SPECIAL_TEXTS.values()
            ),
        ]
        for number, feed in enumerate(feeds):
            assert await store.load(feed) == {}
            await store.save(feed, opening(cursor=f"{number} "))
            await store.save(feed, advanced(opening(cursor=f"{number} ")))
        for number, feed in enumerate(feeds):
            assert await store.load(feed) == advanced(opening(cursor=f"{number} "))
        same = FeedKey(FEED.url, FEED.name, dict(reversed(filters.items())))
        assert await store.load(same) == await store.load(feeds[8])

    # Fencing: a save is refused, as a whole, when one of its positions is not the next one

    async def test_r17_a_position_that_replaces_another_one_is_refused(
        self, store: CursorStore
    ) -> None:
        """Compared for being equal, not for being higher: a database may have gone back."""
        stored = Position("c3", revision=30, replaces=20)
        await store.save(FEED, {0: Position("c1", revision=10)})
        await store.save(FEED, {0: Position("c2", revision=20, replaces=10)})
        await store.save(FEED, {0: stored})
        for replaces in (None, 10, 20, 29, 31, 39):
            with pytest.raises(FencedError):
                await store.save(FEED, {0: Position("other", revision=40, replaces=replaces)})
        with pytest.raises(FencedError):  # what it replaces was deleted
            await store.save(FEED, {1: Position("c", revision=2, replaces=1)})
        assert await store.load(FEED) == {0: stored}

    async def test_r17_one_stale_position_refuses_all(self, store: CursorStore) -> None:
        """A part of a save would tear a split or a merge apart. The error says which it was."""
        positions = opening(range(10))
        for stale in (0, 4, 9):
            feed = FeedKey(FEED.url, f"{stale} is stale")
            await store.save(feed, positions)
            winner = advanced({stale: positions[stale]}, "winner")
            await store.save(feed, winner)
            fresh = advanced({p: position for p, position in positions.items() if p != stale})
            for refused in (
                {**advanced(positions), 10: Position("new")},
                {**fresh, **opening((stale, 11), "new")},
            ):
                with pytest.raises(FencedError) as found:
                    await store.save(feed, refused)
                assert (found.value.feed, found.value.partition) == (FEED.url, stale)
                assert await store.load(feed) == {**positions, **winner}
            await store.save(feed, fresh)
            assert await store.load(feed) == {**fresh, **winner}

    @one_or_several
    async def test_r17_of_concurrent_consumers_one_advances(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        for _ in range(3):
            before = await store.load(FEED)
            winner = await self._race([store], partitions)
            assert await store.load(FEED) == {
                p: following(before.get(p), winner) for p in partitions
            }

    async def test_r17_a_second_handle_fences_the_first(self, store: CursorStore) -> None:
        """Revisions are compared in the storage: the consumers are different processes."""
        self._need("supports_second_handle")
        await store.save(FEED, opening(range(3)))
        async with self.second_handle(store) as second:
            assert await second.load(FEED) == opening(range(3))
            await second.save(FEED, advanced(opening(), "second"))
            with pytest.raises(FencedError):
                await store.save(FEED, advanced(opening(), "first"))
        assert await store.load(FEED) == opening(range(3)) | advanced(opening(), "second")

    @one_or_several
    async def test_r17_of_concurrent_consumers_on_two_handles_one_advances(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        """Comparison and save are one step of the storage: UPDATE ... WHERE revision = ?."""
        self._need("supports_second_handle")
        async with self.second_handle(store) as second:
            for _ in range(3):
                await self._race([store, second], partitions)

    async def test_concurrent_saves_of_what_is_apart_are_all_kept(self, store: CursorStore) -> None:
        """Partitions of one feed, and feeds: none is refused or lost."""
        other = FeedKey(FEED.url, "other")
        last: dict[FeedKey, dict[int, Position]] = {FEED: {}, other: {}}

        async def consume(feed: FeedKey, partition: int) -> None:
            for number in range(5):
                before = last[feed].get(partition)
                last[feed][partition] = following(before, f"{feed.name} {number}")
                await store.save(feed, {partition: last[feed][partition]})

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, FEED if partition % 4 else other, partition)
        for feed, positions in last.items():
            assert await store.load(feed) == positions

    async def _race(self, handles: list[CursorStore], partitions: Iterable[int]) -> str:
        """Let several consumers save the same partitions at once; return who did."""
        saved: list[str] = []
        before = await handles[0].load(FEED)

        async def consume(name: str, handle: CursorStore) -> None:
            try:
                await handle.save(FEED, {p: following(before.get(p), name) for p in partitions})
            except FencedError:
                return
            saved.append(name)

        async with anyio.create_task_group() as group:
            for number in range(CONSUMERS):
                handle = handles[number % len(handles)]
                group.start_soon(consume, f"consumer {number}", handle)
        (winner,) = saved
        return winner

    # The caller's transaction

    async def test_what_is_no_transaction_is_refused(self, store: CursorStore) -> None:
        with pytest.raises(StoreError):  # saved on its own it would outlive a rollback
            await store.save(FEED, opening(), transaction=object())
        assert await store.load(FEED) == {}, "what was refused is not to be saved"

    @pytest.mark.parametrize("partitions", [[0], MANY], ids=["one", "many"])
    async def test_r5_a_save_takes_effect_with_the_callers_transaction(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        """After a rollback the same is saved again. Each save sees those before it."""
        self._need("supports_transactions")
        first = opening(partitions)
        for finish, expected in (
            (self.rollback, {}),
            (self.rollback, {}),
            (self.commit, advanced(first)),
        ):
            transaction = await self.begin(store)
            for positions in ({}, first, advanced(first)):
                await store.save(FEED, positions, transaction=transaction)
            await finish(transaction)
            assert await store.load(FEED) == expected

    @pytest.mark.parametrize("cursor", UNUSUAL_CURSORS)
    async def test_r18_a_cursor_that_is_refused_leaves_the_transaction_usable(
        self, store: CursorStore, cursor: str
    ) -> None:
        """It is refused before a statement fails: the application may go on."""
        self._need("supports_transactions")
        transaction, unusual = await self.begin(store), {3: Position(cursor)}
        try:
            await store.save(FEED, unusual, transaction=transaction)
        except StoreError as error:
            _refused_cursor(error, 3, cursor)
            unusual = {}
        await store.save(FEED, opening(), transaction=transaction)
        await self.commit(transaction)
        assert await store.load(FEED) == opening() | unusual

    @one_or_several
    async def test_r17_a_refused_save_leaves_a_transaction_that_rolls_back(
        self, store: CursorStore, partitions: Iterable[int]
    ) -> None:
        self._need("supports_transactions")
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

    # Storage that fails, and cancellation

    @pytest.mark.parametrize("stored", [0, 10], ids=["first", "later"])
    async def test_a_store_that_fails_in_the_middle_keeps_nothing(
        self, store: CursorStore, stored: int
    ) -> None:
        """It is a StoreError with its cause, and no FencedError: the save is tried again."""
        self._need("supports_failure_injection")
        positions = opening(range(stored))
        await store.save(FEED, positions)
        later = advanced(positions) | opening(range(stored, 11), "new")
        async with self.failing(store):
            with pytest.raises(StoreError) as failed:
                await store.save(FEED, later)
        assert not isinstance(failed.value, FencedError)
        assert (failed.value.feed, failed.value.__cause__ is None) == (FEED.url, False)
        assert await store.load(FEED) == positions
        await store.save(FEED, later)
        assert await store.load(FEED) == later

    async def test_a_save_cancelled_at_any_time_has_saved_all_or_nothing(
        self, store: CursorStore
    ) -> None:
        """A half of a save would skip events."""
        expected = opening(range(300))
        await store.save(FEED, expected)
        for delay in CANCELLATION_DELAYS:
            later = advanced(expected)
            with anyio.move_on_after(delay):
                await store.save(FEED, later)
            expected = await self._one_of(store, expected, later)
        for steps in CANCELLATION_STEPS:
            later = advanced(expected)
            async with anyio.create_task_group() as group:
                group.start_soon(store.save, FEED, later)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            expected = await self._one_of(store, expected, later)
        await store.save(FEED, advanced(expected))

    async def _one_of(
        self, store: CursorStore, *allowed: dict[int, Position]
    ) -> dict[int, Position]:
        found = await store.load(FEED)
        assert found in allowed
        return found

    async def test_a_save_cancelled_in_a_transaction_is_rolled_back(
        self, store: CursorStore
    ) -> None:
        self._need("supports_transactions")
        for delay in CANCELLATION_DELAYS:
            transaction = await self.begin(store)
            with anyio.move_on_after(delay):
                await store.save(FEED, opening(range(1_000)), transaction=transaction)
            await self.rollback(transaction)
            assert await store.load(FEED) == {}
        await store.save(FEED, opening())

    async def test_a_cancelled_queue_of_saves_leaves_the_store_usable(
        self, store: CursorStore
    ) -> None:
        """Saves that wait end when cancelled, and keep no lock or connection."""
        saves, sent = 0, set[Position]()

        async def consume(partition: int) -> None:
            nonlocal saves
            position = None
            for number in range(1, 1_000):
                position = following(position, f"c{number}")
                sent.add(position)
                await store.save(FEED, {partition: position})
                await anyio.lowlevel.checkpoint()  # a store without an await is not cancelled
                saves += 1
                if saves == 100:
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for partition in range(20):
                group.start_soon(consume, partition)
        assert saves < 1_000, "a save that waits has to end when its task is cancelled"
        found = await store.load(FEED)
        assert sent.issuperset(found.values()), "something was stored that nobody saved"
        await store.save(FEED, advanced(found))
