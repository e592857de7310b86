"""Contract tests of saving and loading positions."""

from __future__ import annotations

import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import LAST, FeedKey, Position
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.contracts.contract_positions import (
    ALL_PARTITIONS,
    FEED,
    SPECIAL_TEXTS,
    UNUSUAL_CURSORS,
    advanced,
    following,
    opening,
    refused_cursor,
)
from feedapi_client.testing.contracts.store_contract import StoreContract


class SavingTests(StoreContract):
    """What was saved is loaded, and feeds do not mix."""

    async def test_load_of_a_feed_never_saved_is_empty(self, store: CursorStore) -> None:
        """An empty dict, not an error: that is how a consumer knows its first start."""
        assert await store.load(FEED) == {}

    async def test_a_saved_position_is_loaded(self, store: CursorStore) -> None:
        """As it was saved; `replaces` is no part of what is stored."""
        await store.save(FEED, {7: Position("abc")})
        assert await store.load(FEED) == {7: Position("abc")}

    async def test_every_status_is_kept(self, store: CursorStore) -> None:
        """Partitions that are drained or superseded are not read again."""
        positions = {
            0: Position("a", "open"),
            1: Position("b", "drained"),
            2: Position("c", "superseded"),
        }
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions

    async def test_a_status_changes_with_a_later_save(self, store: CursorStore) -> None:
        """Also where the cursor stays, as at the end of a partition."""
        await store.save(FEED, {0: Position("a"), 1: Position("b")})
        later = {
            0: following(Position("a"), "a", "drained"),
            1: following(Position("b"), "b", "superseded"),
        }
        await store.save(FEED, later)
        assert await store.load(FEED) == later

    async def test_a_later_save_replaces_the_position(self, store: CursorStore) -> None:
        """The last one is loaded, with its revision."""
        positions = opening()
        for number in range(5):
            await store.save(FEED, positions)
            positions = advanced(positions, str(number))
        await store.save(FEED, positions)
        assert await store.load(FEED) == positions
        assert positions[0].cursor == "40"

    async def test_a_save_leaves_other_partitions_alone(self, store: CursorStore) -> None:
        """A save is of the given partitions: the others would start anew."""
        positions = opening(range(5))
        await store.save(FEED, positions)
        later = advanced({2: positions[2]})
        await store.save(FEED, later)
        assert await store.load(FEED) == {**positions, **later}

    async def test_old_and_new_partitions_are_saved_together(self, store: CursorStore) -> None:
        """A split is one save: of a part of it events would be skipped or repeated."""
        parent = opening()
        await store.save(FEED, parent)
        split = opening((1, 2)) | {0: following(parent[0], "c0", "superseded")}
        await store.save(FEED, split)
        assert await store.load(FEED) == split

    async def test_a_save_of_nothing_changes_nothing(self, store: CursorStore) -> None:
        """It is no error, and makes no feed of it."""
        await store.save(FEED, {})
        assert await store.load(FEED) == {}

    async def test_partition_ids_at_both_ends(self, store: CursorStore) -> None:
        """Ids are 0 to 32767."""
        positions = opening((0, 32_767))
        await store.save(FEED, positions)
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
        await store.save(FEED, {p: Position(text) for p, text in texts.items()})
        assert await store.load(FEED) == {p: Position(text) for p, text in texts.items()}
        await store.save(FEED, {p: Position(LAST, "open", 2, 1) for p in texts})
        for p, text in texts.items():
            await store.save(FEED, {p: Position(text, "open", 3, 2)})
        assert await store.load(FEED) == {p: Position(t, revision=3) for p, t in texts.items()}
        await store.save(FEED, {p: Position(text, "open", 4, 3) for p, text in texts.items()})
        assert await store.load(FEED) == {p: Position(t, revision=4) for p, t in texts.items()}

    @pytest.mark.parametrize("cursor", UNUSUAL_CURSORS)
    async def test_r18_a_cursor_is_kept_as_it_is_or_refused_for_its_partition(
        self, store: CursorStore, cursor: str
    ) -> None:
        """What the storage can't hold, as U+0000 or a lone surrogate, is a StoreError with
        `partition=`, not an error of a driver or an encoder, and saves nothing.
        """
        positions = opening(range(3))
        await store.save(FEED, positions)
        later = {1: following(positions[1], cursor), 2: following(positions[2], "usual")}
        try:
            await store.save(FEED, later)
        except StoreError as error:
            refused_cursor(error, 1, cursor)
            later = {}
        assert await store.load(FEED) == positions | later
        await store.save(FEED, advanced(positions | later))

    async def test_special_characters_in_names_and_filters(self, store: CursorStore) -> None:
        """They are any text of a user: `FeedKey.id` is a digest of all of them."""
        feeds = {
            FeedKey("https://service.test/æ%20/feed", text, {text: text}): opening(cursor=name)
            for name, text in SPECIAL_TEXTS.items()
        }
        for feed, positions in feeds.items():
            assert await store.load(feed) == {}
            await store.save(feed, positions)
        for feed, positions in feeds.items():
            assert await store.load(feed) == positions
        assert await store.load(FEED) == {}

    async def test_cursors_of_10_kilobytes(self, store: CursorStore) -> None:
        """Publishers may send up to 16 KiB: a column for it has no shorter limit."""
        long = ["x" * 10_240, "漢🎉" * 5_120]
        positions = {
            partition: Position(f"{long[partition % 2]}{partition}") for partition in range(20)
        }
        await store.save(FEED, positions)
        for partition, cursor in enumerate(long):
            await store.save(FEED, {partition: following(positions[partition], cursor)})
        later = {p: following(positions[p], cursor) for p, cursor in enumerate(long)}
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
        others = [
            FeedKey("https://service.test/feed/", "contract"),
            FeedKey("https://service.test/FEED", "contract"),
            FeedKey("http://service.test/feed", "contract"),
            FeedKey("https://service.test:8443/feed", "contract"),
            FeedKey("https://service.test/feed?tenant=1", "contract"),
            FeedKey("https://service.test/feed", "Contract"),
            FeedKey("https://service.test/feed", "contract "),
            FeedKey("https://service.test/feed", "contract", {"filter-subject": "a"}),
        ]
        await store.save(FEED, opening(cursor="mine"))
        for other in others:
            assert await store.load(other) == {}
            await store.save(other, opening(cursor="other"))
            await store.save(other, advanced(opening(cursor="other"), str(other)))
            assert await store.load(FEED) == opening(cursor="mine")
        for other in others:
            assert await store.load(other) == advanced(opening(cursor="other"), str(other))

    async def test_filter_values_are_apart_and_their_order_does_not_matter(
        self, store: CursorStore
    ) -> None:
        """A cursor holds only for the selection of events that it came with."""
        first = FeedKey(FEED.url, FEED.name, {"filter-a": "1", "filter-b": "2"})
        same = FeedKey(FEED.url, FEED.name, {"filter-b": "2", "filter-a": "1"})
        other = FeedKey(FEED.url, FEED.name, {"filter-a": "2", "filter-b": "1"})
        await store.save(first, opening())
        assert (await store.load(same), await store.load(other)) == (opening(), {})
