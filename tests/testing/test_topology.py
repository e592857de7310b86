"""Partitions that are split, merged, removed and rolled back, as discovery and fetches show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]
FIFTY = [{"entity": f"e{n % 10}", "n": n} for n in range(50)]


def by_number(events: list[Any]) -> list[Any]:
    return sorted(events, key=lambda event: event["n"])


# What discovery lists


def lineage(publisher: Publisher) -> None:
    """Split partitions in both ways, twice for one of them, and list what nobody should."""
    publisher.close(4)
    publisher.split(0, into=(5,))
    publisher.split(1, into=(6,))
    publisher.split(2, into=(7, 8), method="cursor-from")
    publisher.split(7, into=(9,), method="cursor-from")
    publisher.add(20, starts_after=20, cursor_from=(30, 31))


CLOSED = {"closed": True}
LINEAGE: dict[int, dict[str, Any]] = {
    0: CLOSED,
    1: CLOSED,
    3: {},
    4: CLOSED,
    5: {"startsAfterPartition": "0"},
    6: {"startsAfterPartition": "1"},
    8: {"cursorFromPartitions": ["2"]},
    9: {"cursorFromPartitions": ["7", "2"]},
    20: {"startsAfterPartition": "20", "cursorFromPartitions": ["30", "31"]},
}
IN_INTEGERS: dict[int, dict[str, Any]] = {
    5: {"startsAfterParent": 0},
    6: {"startsAfterParent": 1},
    8: {"splitFromAncestors": [2]},
    9: {"splitFromAncestors": [7, 2]},
    20: {"startsAfterParent": 20, "splitFromAncestors": [30, 31]},
}
WITHOUT: dict[int, dict[str, Any]] = {5: {}, 6: {}, 20: {"cursorFromPartitions": ["30", "31"]}}


@pytest.mark.parametrize(
    ("quirks", "changed"),
    [
        (Quirks(), {}),
        (Quirks(integer_ids=True, integer_lineage=True, old_lineage_names=True), IN_INTEGERS),
        (Quirks(omit_parent_zero=True), {5: {}}),
        (Quirks(omit_starts_after=True), WITHOUT),
    ],
)
def test_lineage(make_feed: MakeFeed, quirks: Quirks, changed: dict[int, Any]) -> None:
    feed = make_feed(5, quirks=quirks)
    lineage(feed.publisher)
    name = int if quirks.integer_ids else str
    listed = {**LINEAGE, **changed}
    assert feed.partitions == [{"id": name(id), **listed[id]} for id in LINEAGE]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"dialect": "v2-draft"}, [True, False]),
        ({"dialect": "v2-token"}, [False, False]),
        ({"quirks": Quirks(last_cursor="always")}, [True, True]),
        ({"quirks": Quirks(last_cursor="closed")}, [True, False]),
        ({"quirks": Quirks(last_cursor="never")}, [False, False]),
    ],
)
def test_which_partitions_have_a_last_cursor(
    make_feed: MakeFeed, settings: Any, found: list[bool]
) -> None:
    feed = make_feed(2, **settings)
    ends = [feed.publisher.append(id, {"n": 1}) for id in (0, 1)]
    feed.publisher.close(0)
    assert feed.partitions == [
        {"id": str(id), **({} if id else CLOSED), **({"lastCursor": ends[id]} if found[id] else {})}
        for id in (0, 1)
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda publisher: publisher.split(0),
        lambda publisher: publisher.close(0),
        lambda publisher: publisher.remove(0),
        lambda publisher: publisher.add(),
        lambda publisher: publisher.merge((0, 1)),
    ],
)
def test_a_change_of_topology_changes_the_token(change: Callable[[Publisher], object]) -> None:
    for kept in (False, True):
        publisher = Publisher(2, quirks=Quirks(keep_token=kept))
        before = publisher.token
        change(publisher)
        assert (publisher.token == before) is kept


# What fetches read


def test_starts_after_split_keeps_the_closed_parent(make_feed: MakeFeed) -> None:
    feed = make_feed()
    cursor = feed.publisher.append(0, {"n": 1})
    assert feed.publisher.split(0, into=(5, 7), method="starts-after") == (5, 7)
    assert [feed.read_all(id) for id in (0, 5, 7)] == [[{"n": 1}], [], []]
    assert feed.fetch(5, cursor).status_code == 400


@pytest.mark.parametrize("read", [0, 20])
def test_cursor_from_split_redistributes_the_history(make_feed: MakeFeed, read: int) -> None:
    """A cursor of the ancestor continues at the same point."""
    feed = make_feed()
    cursor = feed.publisher.extend(0, FIFTY[:read])
    feed.publisher.extend(0, FIFTY[read:])
    children = feed.publisher.split(0, into=3, method="cursor-from")
    parts = [feed.read_all(child, cursor) for child in children]
    assert by_number([event for part in parts for event in part]) == FIFTY[read:]
    assert all(parts)
    entities = [{event["entity"] for event in part} for part in parts]
    assert sum(map(len, entities)) == 10
    assert feed.fetch(0).status_code == 404


def test_nested_splits_divide_the_entities_again(make_feed: MakeFeed) -> None:
    feed = make_feed()
    cursor = feed.publisher.extend(0, [{"entity": n} for n in range(400)])
    first, _ = feed.publisher.split(0, into=2, method="cursor-from")
    again = feed.publisher.split(first, into=2, method="cursor-from")
    assert min(len(feed.read_all(id)) for id in again) > 50
    assert feed.read(again[0], cursor) == ([], cursor)


def test_publish_follows_the_entity_through_splits() -> None:
    publisher = Publisher(3)
    for n in range(40):
        publisher.publish(f"e{n % 8}", {"entity": f"e{n % 8}", "n": n})
        if n % 10 == 9:
            publisher.split(
                publisher.route("e1"), method="cursor-from" if n < 20 else "starts-after"
            )
    assert [payload["n"] for payload in publisher.payloads()] == list(range(40))
    targets = {publisher.route(f"e{n}") for n in range(8)}
    assert targets <= set(publisher.open_partitions())


def test_merge_joins_the_histories(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    for n in range(10):
        feed.publisher.append(n % 2, {"n": n})
    child = feed.publisher.merge((0, 1))
    assert feed.partitions == [{"id": "2", "cursorFromPartitions": ["0", "1"]}]
    assert feed.numbers(child) == list(range(10))
    assert feed.publisher.route("anything") == child


def test_a_removed_partition_comes_back_with_its_events(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    feed.publisher.append(1, {"n": 1})
    feed.publisher.remove(1)
    assert [partition["id"] for partition in feed.partitions] == ["0"]
    feed.publisher.add(1)
    assert feed.read_all(1) == [{"n": 1}]


# A split that is rolled back


def publish(publisher: Publisher, first: int) -> None:
    for n in range(first, first + 10):
        publisher.publish(n % 5, {"entity": n % 5, "n": n})


@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
def test_a_rollback_and_the_way_forward_keep_every_event(make_feed: MakeFeed, dialect: str) -> None:
    feed = make_feed(dialect=dialect, checkpoint_every=2)
    publisher = feed.publisher
    publish(publisher, 0)
    children = publisher.split(0, method="cursor-from")
    publish(publisher, 10)
    publisher.roll_back(0)
    assert publisher.open_partitions() == [0]
    assert feed.numbers(0) == list(range(20))
    publish(publisher, 20)
    assert publisher.roll_forward(0) == children
    assert publisher.open_partitions() == [*children]
    publish(publisher, 30)
    parts = [feed.numbers(child) for child in children]
    assert parts == [sorted(part) for part in parts]
    assert sorted(n for part in parts for n in part) == list(range(40))


def test_cursors_stay_valid_over_a_rollback(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.append(0, {"n": 1})
    (child,) = feed.publisher.split(0, 1, method="cursor-from")
    of_the_child = feed.read(child)[1]
    feed.publisher.append(child, {"n": 2})
    feed.publisher.roll_back(0)
    assert feed.fetch(child, of_the_child).status_code == 404
    events, of_the_parent = feed.read(0, of_the_child)
    assert events == [{"n": 2}]
    feed.publisher.append(0, {"n": 3})
    feed.publisher.roll_forward(0)
    assert feed.read(child, of_the_parent)[0] == [{"n": 3}]


# Misuse


@pytest.mark.parametrize("partition", [0, 1, 2, 77])
def test_what_can_not_be_rolled_back(partition: int) -> None:
    """Partition 0 has children, 1 and its successor are split, 2 is merged with another."""
    publisher = Publisher(4)
    publisher.split(0, into=(5,))
    publisher.split(1, into=(6,), method="cursor-from")
    publisher.split(6, into=(7,), method="cursor-from")
    publisher.merge((2, 3))
    with pytest.raises(ValueError, match="partition"):
        publisher.roll_back(partition)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda publisher: publisher.append(9, {}), "not listed"),
        (lambda publisher: publisher.close(9), "not listed"),
        (lambda publisher: publisher.split(0, into=(1, 1)), "different"),
        (lambda publisher: publisher.split(0, into=(0,)), "in use"),
        (lambda publisher: publisher.split(0, into=(32768,)), "32767"),
        (lambda publisher: publisher.split(0, method="sideways"), "cursor-from"),
        (lambda publisher: (publisher.close(0), publisher.append(0, {})), "closed"),
        (lambda publisher: (publisher.split(0), publisher.split(0)), "already"),
        (lambda publisher: publisher.add(0), "already"),
        (lambda publisher: publisher.append(0, b'{"a":\n1}'), "one line"),
        (lambda publisher: (publisher.upgrade("v1"), publisher.split(0)), "no splits"),
        (lambda publisher: publisher.fail(503, on="nothing"), "discovery"),
        (lambda publisher: publisher.roll_forward(4), "no split of partition"),
        (lambda publisher: Publisher((1, 1)), "partition"),
        (lambda publisher: Publisher((-1,)), "partition"),
        (lambda publisher: Publisher((32768,)), "partition"),
        (lambda publisher: Publisher(32769), "partition"),
    ],
)
def test_misuse_is_an_error_that_says_what(
    misuse: Callable[[Publisher], object], says: str
) -> None:
    publisher = Publisher(5)
    with pytest.raises(ValueError, match=says):
        misuse(publisher)
