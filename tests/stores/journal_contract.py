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
from tests.positions import counted, stand

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

    async def test_the_position_of_each_time_is_found(self, store: JournalledStore) -> None:
        history = []
        for number in range(1, 7):
            position = counted(f"c{number}", number)
            await store.save(FEED, {0: position})
            history.append((now(), {0: position}))
        for when, expected in history:
            assert await store.positions_at(FEED, when) == expected

    async def test_there_is_no_position_before_the_first_save(self, store: JournalledStore) -> None:
        before = now()
        await store.save(FEED, opening(range(3)))
        await store.save(FEED, advanced(opening(range(3))))
        assert await store.positions_at(FEED, before) == {}

    async def test_now_is_what_is_stored(self, store: JournalledStore) -> None:
        await store.save(FEED, opening(range(3)))
        assert await store.positions_at(FEED, now()) == await store.load(FEED)

    async def test_a_deleted_position_is_history_and_a_new_one_does_not_hide_it(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening())
        saved = now()
        await store.delete(FEED)
        deleted = now()
        await store.save(FEED, opening(cursor="again"))
        assert await store.positions_at(FEED, saved) == opening()
        assert await store.positions_at(FEED, deleted) == {}
        assert await store.positions_at(FEED, now()) == opening(cursor="again")

    async def test_replaced_positions_are_history(self, store: JournalledStore) -> None:
        await store.save(FEED, opening(range(3)))
        saved = now()
        await store.replace(FEED, opening(range(5), "set"))
        assert await store.positions_at(FEED, saved) == opening(range(3))

    async def test_random_histories_are_found_at_every_time(self, store: JournalledStore) -> None:
        dice = random.Random(7)
        history = []
        for step in range(60):
            stored = await store.load(FEED)
            chosen = dice.sample(range(6), dice.randint(1, 4))
            if dice.random() < 0.2:
                await store.delete(FEED, chosen)
            else:
                await store.save(
                    FEED,
                    {
                        p: stored[p].advance(f"s{step}") if p in stored else Position(f"s{step}")
                        for p in chosen
                    },
                )
            history.append((now(), await store.load(FEED)))
        for when, expected in history:
            assert await store.positions_at(FEED, when) == expected

    async def test_feeds_have_journals_of_their_own(self, store: JournalledStore) -> None:
        await store.save(FEED, opening())
        await store.save(OTHER, opening(cursor="other"))
        when = now()
        await store.save(OTHER, advanced(opening(cursor="other")))
        assert await store.positions_at(FEED, when) == opening()
        assert await store.positions_at(OTHER, when) == opening(cursor="other")

    async def test_a_refused_save_is_no_history(self, store: JournalledStore) -> None:
        await store.save(FEED, opening())
        with pytest.raises(FencedError):
            await store.save(FEED, advanced(advanced(opening())))
        assert await self.journal_rows(store) == FIRST

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

    async def test_rewinding_makes_the_old_positions_current_with_revisions_of_their_own(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening(range(3)))
        when = now()
        await store.save(FEED, advanced(opening(range(2))))
        await store.save(FEED, advanced(advanced(opening((1,)))))
        before = await store.load(FEED)
        rewound = await store.rewind(FEED, when)
        assert stand(rewound) == stand(opening(range(3)))
        assert all(rewound[p].revision > before[p].revision for p in before)
        assert await store.load(FEED) == rewound

    async def test_r17_rewinding_fences_a_running_consumer_on_every_partition(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening(range(3)))
        running = advanced(opening(range(3)))
        await store.rewind(FEED, now())
        for partition in range(3):
            with pytest.raises(FencedError):
                await store.save(FEED, {partition: running[partition]})

    async def test_rewinding_before_a_closing_opens_the_parent_and_forgets_the_children(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening())
        before = now()
        await store.save(FEED, {0: opening()[0].advance("end", "drained")})
        await store.save(FEED, opening((1, 2)))
        rewound = await store.rewind(FEED, before)
        assert stand(rewound) == stand(opening())
        assert await store.load(FEED) == rewound

    async def test_rewinding_before_a_transfer_opens_the_ancestor_and_forgets_the_successors(
        self, store: JournalledStore
    ) -> None:
        await store.save(FEED, opening())
        before = now()
        successors = opening((1, 2))
        superseded = opening()[0].advance(status="superseded")
        await store.save(FEED, {0: superseded, **successors})
        between = now()
        await store.save(FEED, advanced({1: successors[1]}))
        rewound = await store.rewind(FEED, between)
        assert stand(rewound) == stand({0: superseded, **successors})
        assert stand(await store.rewind(FEED, before)) == stand(opening())

    async def test_a_rewind_is_undone_by_another(self, store: JournalledStore) -> None:
        await store.save(FEED, opening(range(2)))
        first = now()
        await store.save(FEED, {**advanced(opening((0,))), 2: Position("new")})
        last = now()
        await store.rewind(FEED, first)
        assert {p: found.cursor for p, found in (await store.load(FEED)).items()} == {
            0: "c0",
            1: "c1",
        }
        await store.rewind(FEED, last)
        assert {p: found.cursor for p, found in (await store.load(FEED)).items()} == {
            0: "d0",
            1: "c1",
            2: "new",
        }

    async def test_rewinding_brings_deleted_positions_back(self, store: JournalledStore) -> None:
        await store.save(FEED, opening(range(2)))
        when = now()
        await store.delete(FEED)
        assert stand(await store.rewind(FEED, when)) == stand(opening(range(2)))

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
