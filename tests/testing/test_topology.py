from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.testing import Publisher, Quirks
from tests.testing.feed import Feed

MakeFeed = Callable[..., Feed]


def partitions(feed: Feed) -> list[dict[str, Any]]:
    return feed.discover()["partitions"]


def test_a_closed_partition_has_its_last_cursor(feed: MakeFeed) -> None:
    one = feed(dialect="v2-draft")
    end = one.publisher.append(0, {"n": 1})
    one.publisher.close(0)
    assert partitions(one) == [{"id": "0", "closed": True, "lastCursor": end}]


def test_the_published_dialect_has_no_last_cursor(feed: MakeFeed) -> None:
    one = feed()
    one.publisher.close(0)
    assert partitions(one) == [{"id": "0", "closed": True}]


@pytest.mark.parametrize(
    ("mode", "found"),
    [("always", [True, True]), ("closed", [True, False]), ("never", [False, False])],
)
def test_last_cursor_can_be_had_otherwise(feed: MakeFeed, mode: Any, found: list[bool]) -> None:
    one = feed(2, quirks=Quirks(last_cursor=mode))
    one.publisher.close(0)
    assert ["lastCursor" in partition for partition in partitions(one)] == found


def test_starts_after_split_keeps_the_closed_parent(feed: MakeFeed) -> None:
    one = feed(dialect="v2-draft")
    end = one.publisher.append(0, {"n": 1})
    assert one.publisher.split(0, into=(5, 7), method="starts-after") == (5, 7)
    assert partitions(one) == [
        {"id": "0", "closed": True, "lastCursor": end},
        {"id": "5", "startsAfterPartition": "0"},
        {"id": "7", "startsAfterPartition": "0"},
    ]
    assert one.read_all(0) == [{"n": 1}]
    assert one.read_all(5) == []


def test_cursor_from_split_redistributes_the_history(feed: MakeFeed) -> None:
    one = feed(dialect="v2-draft")
    events = [{"entity": f"e{n % 10}", "n": n} for n in range(50)]
    one.publisher.extend(0, events)
    first, second = one.publisher.split(0, method="cursor-from")
    assert partitions(one) == [
        {"id": str(id), "cursorFromPartitions": ["0"]} for id in (first, second)
    ]
    parts = [one.read_all(first), one.read_all(second)]
    assert sorted(parts[0] + parts[1], key=lambda event: event["n"]) == events
    assert all(parts)
    assert not {event["entity"] for event in parts[0]} & {event["entity"] for event in parts[1]}
    assert one.fetch(0).status_code == 404


def test_an_ancestors_cursor_goes_on_at_the_same_point(feed: MakeFeed) -> None:
    one = feed()
    events = [{"entity": f"e{n % 10}", "n": n} for n in range(50)]
    one.publisher.extend(0, events[:20])
    cursor = one.publisher.end_cursor(0)
    one.publisher.extend(0, events[20:])
    children = one.publisher.split(0, into=3, method="cursor-from")
    rest = [event for child in children for event in one.read_all(child, cursor)]
    assert sorted(rest, key=lambda event: event["n"]) == events[20:]


def test_nested_cursor_from_splits_list_the_path_to_the_root(feed: MakeFeed) -> None:
    one = feed()
    cursor = one.publisher.append(0, {"entity": "a"})
    one.publisher.split(0, into=(1, 2), method="cursor-from")
    one.publisher.split(1, into=(3, 4), method="cursor-from")
    assert partitions(one)[1] == {"id": "3", "cursorFromPartitions": ["1", "0"]}
    assert one.read(3, cursor) == ([], cursor)


def test_nested_splits_divide_the_entities_anew() -> None:
    publisher = Publisher()
    publisher.extend(0, [{"entity": n} for n in range(400)])
    one, _ = publisher.split(0, into=2, method="cursor-from")
    parts = [
        len(publisher.payloads(id)) for id in publisher.split(one, into=2, method="cursor-from")
    ]
    assert min(parts) > 50


def test_a_cursor_of_a_starts_after_parent_is_not_valid_on_the_child(feed: MakeFeed) -> None:
    one = feed()
    cursor = one.publisher.append(0, {"n": 1})
    child, _ = one.publisher.split(0)
    assert one.fetch(child, cursor).status_code == 400


def test_publish_follows_the_entity_through_splits() -> None:
    publisher = Publisher(3)
    for n in range(40):
        publisher.publish(f"e{n % 8}", {"entity": f"e{n % 8}", "n": n})
        if n % 10 == 9:
            publisher.split(
                publisher.route("e1"), method="cursor-from" if n < 20 else "starts-after"
            )
    assert [payload["n"] for payload in publisher.payloads()] == list(range(40))
    homes = {publisher.route(f"e{n}") for n in range(8)}
    assert homes <= set(publisher.open_partitions())


def test_a_split_by_a_key_of_its_own(feed: MakeFeed) -> None:
    one = feed()
    one.publisher.extend(0, [{"entity": n, "country": n % 5} for n in range(50)])
    children = one.publisher.split(
        0, into=2, method="cursor-from", key=lambda payload: payload["country"]
    )
    countries = [{event["country"] for event in one.read_all(child)} for child in children]
    assert not countries[0] & countries[1]
    home = one.publisher.publish(7, {"entity": 7, "country": 3})[0]
    assert 3 in countries[children.index(home)]


def test_merge_joins_the_histories(feed: MakeFeed) -> None:
    one = feed(2)
    for n in range(10):
        one.publisher.append(n % 2, {"n": n})
    child = one.publisher.merge((0, 1))
    assert partitions(one) == [{"id": "2", "cursorFromPartitions": ["0", "1"]}]
    assert [event["n"] for event in one.read_all(child)] == list(range(10))
    assert one.publisher.route("anything") == child


def test_a_removed_partition_comes_back_with_its_events(feed: MakeFeed) -> None:
    one = feed(2)
    one.publisher.append(1, {"n": 1})
    one.publisher.remove(1)
    assert [partition["id"] for partition in partitions(one)] == ["0"]
    one.publisher.add(1)
    assert one.read_all(1) == [{"n": 1}]


def test_any_lineage_can_be_listed(feed: MakeFeed) -> None:
    one = feed()
    one.publisher.add(9, starts_after=9, cursor_from=(4, 5))
    assert partitions(one)[1] == {
        "id": "9",
        "startsAfterPartition": "9",
        "cursorFromPartitions": ["4", "5"],
    }


def test_quirks_of_discovery(feed: MakeFeed) -> None:
    one = feed(quirks=Quirks(integer_ids=True, integer_lineage=True, old_lineage_names=True))
    one.publisher.split(0, into=(1,))
    one.publisher.split(1, into=(2,), method="cursor-from")
    one.publisher.add(3, starts_after=0)
    assert partitions(one) == [
        {"id": 0, "closed": True},
        {"id": 2, "splitFromAncestors": [1]},
        {"id": 3, "startsAfterParent": 0},
    ]


def test_the_parent_can_be_left_out_when_it_is_zero(feed: MakeFeed) -> None:
    one = feed(quirks=Quirks(omit_parent_zero=True))
    one.publisher.split(0, into=(1,))
    one.publisher.split(1, into=(2,))
    assert partitions(one) == [
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
