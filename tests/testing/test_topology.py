from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.testing.served_feed import ServedFeed

MakeFeed = Callable[..., ServedFeed]


def partitions(feed: ServedFeed) -> list[dict[str, Any]]:
    return feed.discover()["partitions"]


def test_a_closed_partition_has_its_last_cursor(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-draft")
    end = feed.publisher.append(0, {"n": 1})
    feed.publisher.close(0)
    assert partitions(feed) == [{"id": "0", "closed": True, "lastCursor": end}]


def test_the_published_dialect_has_no_last_cursor(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.close(0)
    assert partitions(feed) == [{"id": "0", "closed": True}]


@pytest.mark.parametrize(
    ("mode", "found"),
    [("always", [True, True]), ("closed", [True, False]), ("never", [False, False])],
)
def test_a_quirk_says_which_partitions_have_a_last_cursor(
    make_feed: MakeFeed, mode: Any, found: list[bool]
) -> None:
    feed = make_feed(2, quirks=Quirks(last_cursor=mode))
    feed.publisher.close(0)
    assert ["lastCursor" in partition for partition in partitions(feed)] == found


def test_starts_after_split_keeps_the_closed_parent(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-draft")
    end = feed.publisher.append(0, {"n": 1})
    assert feed.publisher.split(0, into=(5, 7), method="starts-after") == (5, 7)
    assert partitions(feed) == [
        {"id": "0", "closed": True, "lastCursor": end},
        {"id": "5", "startsAfterPartition": "0"},
        {"id": "7", "startsAfterPartition": "0"},
    ]
    assert feed.read_all(0) == [{"n": 1}]
    assert feed.read_all(5) == []


def test_cursor_from_split_redistributes_the_history(make_feed: MakeFeed) -> None:
    feed = make_feed(dialect="v2-draft")
    events = [{"entity": f"e{n % 10}", "n": n} for n in range(50)]
    feed.publisher.extend(0, events)
    first, second = feed.publisher.split(0, method="cursor-from")
    assert partitions(feed) == [
        {"id": str(id), "cursorFromPartitions": ["0"]} for id in (first, second)
    ]
    parts = [feed.read_all(first), feed.read_all(second)]
    assert sorted(parts[0] + parts[1], key=lambda event: event["n"]) == events
    assert all(parts)
    assert not {event["entity"] for event in parts[0]} & {event["entity"] for event in parts[1]}
    assert feed.fetch(0).status_code == 404


def test_an_ancestors_cursor_continues_at_the_same_point(make_feed: MakeFeed) -> None:
    feed = make_feed()
    events = [{"entity": f"e{n % 10}", "n": n} for n in range(50)]
    feed.publisher.extend(0, events[:20])
    cursor = feed.publisher.end_cursor(0)
    feed.publisher.extend(0, events[20:])
    children = feed.publisher.split(0, into=3, method="cursor-from")
    rest = [event for child in children for event in feed.read_all(child, cursor)]
    assert sorted(rest, key=lambda event: event["n"]) == events[20:]


def test_nested_cursor_from_splits_list_the_path_to_the_root(make_feed: MakeFeed) -> None:
    feed = make_feed()
    cursor = feed.publisher.append(0, {"entity": "a"})
    feed.publisher.split(0, into=(1, 2), method="cursor-from")
    feed.publisher.split(1, into=(3, 4), method="cursor-from")
    assert partitions(feed)[1] == {"id": "3", "cursorFromPartitions": ["1", "0"]}
    assert feed.read(3, cursor) == ([], cursor)


def test_nested_splits_divide_the_entities_again() -> None:
    publisher = Publisher()
    publisher.extend(0, [{"entity": n} for n in range(400)])
    first, _ = publisher.split(0, into=2, method="cursor-from")
    again = publisher.split(first, into=2, method="cursor-from")
    parts = [len(publisher.payloads(id)) for id in again]
    assert min(parts) > 50


def test_a_cursor_of_a_starts_after_parent_is_not_valid_on_the_child(make_feed: MakeFeed) -> None:
    feed = make_feed()
    cursor = feed.publisher.append(0, {"n": 1})
    child, _ = feed.publisher.split(0)
    assert feed.fetch(child, cursor).status_code == 400


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


def test_a_split_by_another_key(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.extend(0, [{"entity": n, "country": n % 5} for n in range(50)])
    children = feed.publisher.split(
        0, into=2, method="cursor-from", key=lambda payload: payload["country"]
    )
    countries = [{event["country"] for event in feed.read_all(child)} for child in children]
    assert not countries[0] & countries[1]
    target = feed.publisher.publish(7, {"entity": 7, "country": 3})[0]
    assert 3 in countries[children.index(target)]


def test_merge_joins_the_histories(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    for n in range(10):
        feed.publisher.append(n % 2, {"n": n})
    child = feed.publisher.merge((0, 1))
    assert partitions(feed) == [{"id": "2", "cursorFromPartitions": ["0", "1"]}]
    assert [event["n"] for event in feed.read_all(child)] == list(range(10))
    assert feed.publisher.route("anything") == child


def test_a_removed_partition_comes_back_with_its_events(make_feed: MakeFeed) -> None:
    feed = make_feed(2)
    feed.publisher.append(1, {"n": 1})
    feed.publisher.remove(1)
    assert [partition["id"] for partition in partitions(feed)] == ["0"]
    feed.publisher.add(1)
    assert feed.read_all(1) == [{"n": 1}]


def test_any_lineage_can_be_listed(make_feed: MakeFeed) -> None:
    feed = make_feed()
    feed.publisher.add(9, starts_after=9, cursor_from=(4, 5))
    assert partitions(feed)[1] == {
        "id": "9",
        "startsAfterPartition": "9",
        "cursorFromPartitions": ["4", "5"],
    }


def test_quirks_of_discovery(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(integer_ids=True, integer_lineage=True, old_lineage_names=True))
    feed.publisher.split(0, into=(1,))
    feed.publisher.split(1, into=(2,), method="cursor-from")
    feed.publisher.add(3, starts_after=0)
    assert partitions(feed) == [
        {"id": 0, "closed": True},
        {"id": 2, "splitFromAncestors": [1]},
        {"id": 3, "startsAfterParent": 0},
    ]


def test_the_parent_can_be_left_out_when_it_is_zero(make_feed: MakeFeed) -> None:
    feed = make_feed(quirks=Quirks(omit_parent_zero=True))
    feed.publisher.split(0, into=(1,))
    feed.publisher.split(1, into=(2,))
    assert partitions(feed) == [
        {"id": "0", "closed": True},
        {"id": "1", "closed": True},
        {"id": "2", "startsAfterPartition": "1"},
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
    publisher = Publisher(2)
    before = publisher.token
    change(publisher)
    assert publisher.token != before


def test_the_token_can_be_kept() -> None:
    publisher = Publisher(quirks=Quirks(keep_token=True))
    before = publisher.token
    publisher.split(0)
    assert publisher.token == before


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
    ],
)
def test_misuse_is_an_error_that_says_what(
    misuse: Callable[[Publisher], object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        misuse(Publisher())


@pytest.mark.parametrize("partitions", [(1, 1), (-1,), (32768,), 32769])
def test_partition_ids_are_checked(partitions: Any) -> None:
    with pytest.raises(ValueError, match="partition"):
        Publisher(partitions)
