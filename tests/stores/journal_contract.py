"""The contract of stores with a journal, as tests.

A subclass gives the fixture `make`, whose function opens a store on the test's storage, and the
two methods that look into that storage.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import anyio
import anyio.lowlevel
import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores import Journal, JournalledStore
from feedapi_client.testing.contracts import advanced, opening
from tests.positions import stand

FEED = FeedKey("https://service.test/feed", "journal")
OTHER = FeedKey("https://service.test/feed", "other")
FOREVER = Journal(keep=None)
FIRST = 1
"""The row that a first save leaves: nothing was stored before."""
AGING = (
    "UPDATE feedapi_cursors SET saved_at = saved_at - :by",
    "UPDATE feedapi_cursors_journal SET saved_at = saved_at - :by, replaced_at = replaced_at - :by",
)
"""SQL that makes everything in the store older by a number of microseconds."""
Make = Callable[[Journal | None], Awaitable[JournalledStore]]


def now() -> datetime:
    return datetime.now(UTC)


@pytest.mark.anyio
class JournalContract:
    @pytest.fixture
    async def make(self) -> Make:
        raise NotImplementedError

    async def journal_rows(self, store: JournalledStore) -> int:
        """Return the number of entries in the journal."""
        raise NotImplementedError

    async def age(self, store: JournalledStore, seconds: int) -> None:
        """Make everything in the store older."""
        raise NotImplementedError

    @pytest.fixture
    async def store(self, make: Make) -> JournalledStore:
        return await make(FOREVER)

    # History

    async def test_random_histories_are_found_at_every_time(self, store: JournalledStore) -> None:
        """Each feed's own; what is refused is no history."""
        dice = random.Random(7)
        history = [(now(), dict[int, Position](), dict[int, Position]())]
        for step in range(80):
            feed = dice.choice((FEED, FEED, OTHER))
            stored = await store.load(feed)
            chosen = dice.sample(range(6), dice.randint(1, 4))
            positions = {
                p: stored[p].advance(f"s{step}") if p in stored else Position(f"s{step}")
                for p in chosen
            }
            change = dice.random()
            if change < 0.2:
                await store.delete(feed, chosen)
            elif change < 0.3:
                await store.replace(feed, positions)
            elif change < 0.4:
                rows = await self.journal_rows(store)
                with pytest.raises(FencedError):
                    await store.save(feed, advanced(advanced(positions)))
                assert await self.journal_rows(store) == rows
            else:
                await store.save(feed, positions)
            history.append((now(), await store.load(FEED), await store.load(OTHER)))
        for when, *expected in history:
            assert [await store.positions_at(feed, when) for feed in (FEED, OTHER)] == expected

    # What the journal does not know

    async def test_without_a_journal_nothing_is_written_and_asking_is_an_error(
        self, make: Make
    ) -> None:
        await (await make(FOREVER)).load(FEED)
        store = await make(None)
        await store.save(FEED, opening())
        await store.save(FEED, advanced(opening()))
        assert await self.journal_rows(store) == 0
        with pytest.raises(StoreError, match="keeps no journal"):
            await store.positions_at(FEED, now())
        with pytest.raises(StoreError, match="keeps no journal"):
            await store.rewind(FEED, now())

    async def test_a_time_without_zone_is_refused(self, store: JournalledStore) -> None:
        with pytest.raises(ValueError, match="no time zone"):
            await store.positions_at(FEED, datetime(2026, 1, 1))

    async def test_a_gap_is_an_error(self, make: Make) -> None:
        store = await make(FOREVER)
        await store.save(FEED, opening(range(2)))
        known = now()
        await (await make(None)).save(FEED, advanced({1: opening((1,))[1]}))
        gap = now()
        await (await make(None)).save(FEED, advanced(advanced({1: opening((1,))[1]})))
        with pytest.raises(StoreError, match="does not know") as failed:
            await store.positions_at(FEED, gap)
        assert failed.value.partition == 1
        with pytest.raises(StoreError, match="does not know"):
            await store.positions_at(FEED, known)
        assert await store.positions_at(FEED, now()) == await store.load(FEED)

    async def test_a_journal_enabled_later_has_the_positions_of_that_time(self, make: Make) -> None:
        plain = await make(None)
        await plain.save(FEED, opening(range(2)))
        await plain.save(FEED, advanced(opening(range(2))))
        when = now()
        store = await make(FOREVER)
        await store.save(FEED, advanced(advanced(opening())))
        assert await store.positions_at(FEED, when) == advanced(opening(range(2)))

    async def test_a_time_beyond_the_retention_is_refused(self, make: Make) -> None:
        store = await make(Journal(keep=timedelta(hours=1)))
        await store.save(FEED, opening())
        with pytest.raises(StoreError, match="does not reach back"):
            await store.positions_at(FEED, now() - timedelta(hours=2))

    async def test_old_entries_are_pruned_and_those_within_the_retention_stay(
        self, make: Make
    ) -> None:
        journal = Journal(keep=timedelta(hours=1))
        store = await make(journal)
        position = Position.after(None, "c")
        for _ in range(30):
            await store.save(FEED, {0: position})
            last, position = position, position.advance()
        await self.age(store, 2 * 3600)
        assert await self.journal_rows(store) == FIRST + 29
        store = await make(journal)  # prunes with its first save
        for _ in range(3):
            await store.save(FEED, {0: position})
            position = position.advance()
        assert await self.journal_rows(store) == 3
        half_an_hour_ago = now() - timedelta(minutes=30)
        assert await store.positions_at(FEED, half_an_hour_ago) == {0: last}

    # Rewinding

    async def test_rewinding_to_any_time_makes_what_was_stored_then_current(
        self, store: JournalledStore
    ) -> None:
        """Across endings, splits, transfers and deletions; a rewind is undone by another."""
        first = opening(range(2))
        superseded = {1: first[1].advance(status="superseded"), **opening((4, 5))}
        saves = (
            first,
            {0: first[0].advance("end", "drained"), **opening((2, 3))},
            superseded,
            advanced({4: superseded[4]}),
        )
        history = []
        for positions in saves:
            await store.save(FEED, positions)
            history.append((now(), stand(await store.load(FEED))))
        await store.delete(FEED, [3, 5])
        for when, expected in [*history, *reversed(history), history[3], history[0]]:
            before = await store.load(FEED)
            rewound = await store.rewind(FEED, when)
            assert stand(rewound) == expected
            assert await store.load(FEED) == rewound
            assert all(rewound[p].revision > before[p].revision for p in before.keys() & rewound)

    async def test_r17_rewinding_fences_a_running_consumer_on_every_partition(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening(range(3)))
        running = advanced(opening(range(3)))
        await store.rewind(FEED, now())
        for partition in range(3):
            with pytest.raises(FencedError):
                await store.save(FEED, {partition: running[partition]})

    async def test_rewinding_before_the_first_save_changes_nothing(
        self, store: JournalledStore
    ) -> None:
        before = now()
        await store.save(FEED, opening())
        with pytest.raises(StoreError, match="had no position"):
            await store.rewind(FEED, before)
        assert await store.load(FEED) == opening()

    async def test_rewinding_many_partitions(self, store: JournalledStore) -> None:
        positions = opening(range(3_000))
        await store.save(FEED, positions)
        when = now()
        await store.save(FEED, {**advanced(opening(range(2_000))), **opening(range(3_000, 4_000))})
        assert stand(await store.rewind(FEED, when)) == stand(positions)
        assert set(await store.load(FEED)) == set(positions)

    async def test_rewinding_wins_against_a_running_consumer(self, store: JournalledStore) -> None:
        fenced = anyio.Event()
        await store.save(FEED, opening())
        when = now()

        async def consume() -> None:
            positions = advanced(opening())
            try:
                while True:
                    await store.save(FEED, positions)
                    positions = advanced(positions)
                    await anyio.lowlevel.checkpoint()
            except FencedError:
                fenced.set()

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            with anyio.fail_after(30):
                while await store.load(FEED) in (opening(), advanced(opening())):
                    await anyio.lowlevel.checkpoint()
                rewound = await store.rewind(FEED, when)
                await fenced.wait()
        assert await store.load(FEED) == rewound
        assert rewound[0].cursor == "c0"
