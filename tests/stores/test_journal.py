"""When a journal is pruned. What a journal holds is tested with each store."""

from __future__ import annotations

from datetime import timedelta

import pytest

from feedapi_client import FeedKey
from feedapi_client.stores import Journal
from feedapi_client.stores.journal import Pruner

FEED = FeedKey("https://service.test/feed")
OTHER = FeedKey("https://service.test/feed", "other")
SECOND = 1_000_000
HOUR = 3600 * SECOND
START = 1_700_000_000 * SECOND


def prunes(keep: timedelta | None, saves: int, pause: int) -> list[int]:
    """The numbers of those saves that prune the journal, with `pause` microseconds between them."""
    pruner = Pruner(Journal(keep=keep))
    return [n for n in range(saves) if pruner.due(FEED, START + n * pause) is not None]


def test_the_first_save_prunes_what_is_older_than_the_retention() -> None:
    pruner = Pruner(Journal(keep=timedelta(hours=5)))
    assert pruner.due(FEED, START) == START - 5 * HOUR


def test_of_many_saves_only_twenty_in_a_retention_prune() -> None:
    """The cost of pruning does not grow with the number of saves."""
    keep = timedelta(hours=1)
    assert len(prunes(keep, 100, HOUR // 100)) == 20
    assert len(prunes(keep, 100_000, HOUR // 100_000)) == 20


def test_a_long_retention_is_pruned_once_an_hour() -> None:
    assert prunes(timedelta(days=365), 241, HOUR // 60) == [0, 60, 120, 180, 240]


def test_each_feed_is_pruned_on_its_own() -> None:
    pruner = Pruner(Journal())
    assert pruner.due(FEED, START) is not None
    assert pruner.due(OTHER, START) is not None
    assert pruner.due(FEED, START) is None


def test_a_clock_that_is_set_back_does_not_end_the_pruning() -> None:
    pruner = Pruner(Journal())
    pruner.due(FEED, START)
    assert pruner.due(FEED, START - 24 * HOUR) is not None


def test_a_journal_that_is_kept_forever_is_never_pruned() -> None:
    assert prunes(None, 10, HOUR) == []


def test_without_a_journal_nothing_is_pruned() -> None:
    assert Pruner(None).due(FEED, START) is None


def test_a_retention_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"Journal\.keep must be positive"):
        Journal(keep=timedelta(0))
