"""What a relay remembers of the batches that were acked, and what it publishes again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.liftbridge.recently_acked import SECONDS, AckedBatch, RecentlyAcked


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(source: int, *offsets: int, acked: float = 0, places: list[int] | int = 0) -> AckedBatch:
    values = [b"%d:%d" % (source, offset) for offset in offsets]
    return AckedBatch(source, values, (), (), {}, places, offsets, acked)


def values(batches: list[AckedBatch]) -> list[bytes]:
    return [value for each in batches for value in each.values]


def test_offsets_of_interleaved_batches_show_no_loss() -> None:
    recent = RecentlyAcked(Clock())
    assert recent.add(batch(0, 0, 1, 4, 5)) == {}
    assert recent.add(batch(1, 2, 3, 6)) == {}
    assert recent.ends() == {0: 7}


def test_the_lowest_offset_that_is_acked_twice_shows_what_is_lost() -> None:
    recent = RecentlyAcked(Clock())
    recent.add(batch(0, 0, 1, 2, 3))
    recent.add(batch(1, 4, 5))
    new = batch(1, 3, 2, acked=1)
    assert recent.add(new) == {0: 2}
    assert values(recent.lost(0, 0, 2, before=1)) == [b"0:2", b"0:3"]
    # In the order of the feed: the new one follows what is lost.
    assert values(recent.lost(1, 0, 2, before=1)) == [b"1:4", b"1:5", b"1:3", b"1:2"]
    recent.shorten({0: 2})
    assert recent.ends() == {0: 2}


def test_a_batch_that_was_acked_after_the_loss_is_kept() -> None:
    recent = RecentlyAcked(Clock())
    recent.add(batch(0, 0, 1))
    assert recent.add(batch(1, 1, 2, acked=1)) == {0: 1}
    assert values(recent.lost(0, 0, 1, before=1)) == [b"0:1"]
    assert recent.lost(1, 0, 1, before=1) == []
    recent.shorten({0: 1})
    assert recent.ends() == {0: 3}
    assert recent.add(batch(0, 2, acked=2)) == {0: 2}


def test_each_partition_of_the_stream_has_its_own_offsets() -> None:
    recent = RecentlyAcked(Clock())
    assert recent.add(batch(0, 0, 0, 1, 1, places=[0, 1, 0, 1])) == {}
    assert recent.add(batch(1, 1, acked=1, places=1)) == {1: 1}
    assert values(recent.lost(0, 1, 1, before=1)) == [b"0:1"]
    assert recent.ends() == {0: 2, 1: 2}


def test_what_could_not_be_published_again_is_lost_at_the_next_look() -> None:
    recent = RecentlyAcked(Clock())
    recent.add(batch(0, 0, 1, 2))
    lost = recent.lost(0, 0, 1, before=1)
    recent.put_back(lost)
    assert recent.ends() == {0: 3}
    assert values(recent.lost(0, 0, 1, before=1)) == [b"0:1", b"0:2"]
    assert recent.sources() == [0]


def test_what_is_old_is_forgotten_except_the_newest() -> None:
    clock = Clock()
    recent = RecentlyAcked(clock)
    recent.add(batch(0, 0, 1))
    clock.now = SECONDS + 1
    assert recent.sources() == [0]
    assert recent.add(batch(1, 2, acked=clock.now)) == {}
    assert recent.sources() == [1]
    assert recent.add(batch(2, 0, acked=clock.now)) == {}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.recently_acked._BYTES", 1000)
    recent = RecentlyAcked(Clock())
    for n in range(100):
        recent.add(batch(n, n))
    assert recent.sources() == list(range(94, 100))
    recent.add(batch(7, *range(100, 120)))
    assert recent.sources() == [7]


def test_a_loss_of_what_is_no_longer_remembered_is_told_once() -> None:
    clock = Clock()
    recent = RecentlyAcked(clock)
    recent.add(batch(0, 5, places=1))
    clock.now = SECONDS + 1
    recent.add(batch(0, 0, acked=clock.now))
    assert recent.ends() == {0: 1, 1: 6}
    recent.shorten({1: 2})
    assert recent.ends() == {0: 1, 1: 2}


@given(
    sources=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
    kept=st.integers(0, 240),
)
def test_all_that_is_gone_is_returned_once_in_the_order_of_each_partition(
    sources: list[int], sizes: list[int], kept: int
) -> None:
    recent = RecentlyAcked(Clock())
    offset = 0
    stored: dict[int, list[bytes]] = {}
    for source, size in zip(sources, sizes, strict=False):
        new = batch(source, *range(offset, offset + size))
        assert recent.add(new) == {}
        stored.setdefault(source, []).extend(new.values)
        offset += size
    for source in recent.sources():
        again = values(recent.lost(source, 0, kept, before=1))
        assert again == [each for each in stored[source] if int(each.split(b":")[1]) >= kept]
    recent.shorten({0: kept})
    assert recent.ends() == {0: min(kept, offset)}
