"""``feedapi cat`` in this process: what is printed and what is stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import Feedapi

Make = Callable[..., Publisher]


def _lines(result: Any) -> list[Any]:
    assert result.exit_code == 0, result.output
    return [orjson.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(1, page_size=3, checkpoint_every=2)
    for n in range(5):
        publisher.append(0, {"entity": "a", "n": n})
    return publisher


def _cursors(store: Path) -> dict[int, str]:
    with sqlite3.connect(store) as connection:
        found = dict(connection.execute("SELECT partition_id, feed_cursor FROM feedapi_cursors"))
    connection.close()
    return found


def test_events_are_lines_with_partition_and_payload(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    assert _lines(feedapi("cat", publisher.url)) == [
        {"partition": 0, "data": {"entity": "a", "n": n}} for n in range(5)
    ]


def test_raw_payloads_are_those_of_the_publisher_byte_for_byte(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(1)
    payloads = [b'{ "a" : 1.0, "a":"\\u00e6" }', '"text\u2028"'.encode(), b"{}"]
    publisher.extend(0, payloads)
    assert feedapi("cat", publisher.url, "--raw").stdout_bytes == b"".join(
        payload + b"\n" for payload in payloads
    )


def test_wrapped_payloads_are_those_of_the_publisher_byte_for_byte(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(1)
    publisher.extend(0, [b'{ "a" : 1.0 }', b'"s"'])
    assert (
        feedapi("cat", publisher.url).stdout
        == '{"partition":0,"data":{ "a" : 1.0 }}\n{"partition":0,"data":"s"}\n'
    )


def test_headers_of_a_v1_feed_are_printed(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(2, dialect="v1")
    publisher.append(1, {"n": 1}, headers={"h": "x"})
    publisher.append(1, {"n": 2})
    printed = _lines(feedapi("cat", publisher.url, "--v1-partitions", 2, "--v1-header", "_all"))
    assert printed == [
        {"partition": 1, "headers": {"h": "x"}, "data": {"n": 1}},
        {"partition": 1, "data": {"n": 2}},
    ]


def test_a_printed_cursor_can_be_given_to_from(feedapi: Feedapi, publisher: Publisher) -> None:
    first = feedapi("cat", publisher.url, "--format", r"%c\n").stdout.splitlines()[-1]
    publisher.append(0, {"entity": "a", "n": 5})
    assert _lines(feedapi("cat", publisher.url, "--partition", 0, "--from", first)) == [
        {"partition": 0, "data": {"entity": "a", "n": 5}}
    ]


def test_from_last_skips_the_events_before_the_start(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    assert _lines(feedapi("cat", publisher.url, "--from", "last")) == []


def test_it_ends_after_limit_events(feedapi: Feedapi, publisher: Publisher) -> None:
    assert [line["data"]["n"] for line in _lines(feedapi("cat", publisher.url, "--limit", 4))] == [
        0,
        1,
        2,
        3,
    ]


def test_with_a_store_the_next_run_goes_on_where_the_last_one_ended(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    assert len(_lines(feedapi("cat", publisher.url, "--store", store))) == 5
    publisher.append(0, {"entity": "a", "n": 5})
    assert [
        line["data"]["n"] for line in _lines(feedapi("cat", publisher.url, "--store", store))
    ] == [5]
    assert _cursors(store) == {0: publisher.end_cursor(0)}


def test_names_have_cursors_of_their_own(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    assert len(_lines(feedapi("cat", publisher.url, "--store", store))) == 5
    assert len(_lines(feedapi("cat", publisher.url, "--store", store, "--name", "other"))) == 5


def test_a_feed_with_a_name_may_move(feedapi: Feedapi, publisher: Publisher, store: Path) -> None:
    url = str(publisher.url)
    assert len(_lines(feedapi("cat", url, "--store", store))) == 5
    named = ("--store", store, "--feed-name", "payments")
    assert _lines(feedapi("cat", url, *named)) == []  # adopted
    publisher.append(0, {"entity": "a", "n": 5})
    moved = _lines(feedapi("cat", url.replace("127.0.0.1", "localhost"), *named))
    assert [line["data"]["n"] for line in moved] == [5]


def test_r5_a_limit_with_a_store_ends_at_a_cursor_so_that_the_next_run_goes_on(
    feedapi: Feedapi, feedapi_publisher_factory: Make, store: Path
) -> None:
    publisher = feedapi_publisher_factory(1, page_size=100, checkpoint_every=100)
    publisher.extend(0, [{"n": n} for n in range(10)])
    runs = [
        [
            line["data"]["n"]
            for line in _lines(feedapi("cat", publisher.url, "--store", store, "--limit", 4))
        ]
        for _ in range(4)
    ]
    assert runs == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


def test_r5_a_limit_where_the_publisher_ignores_page_sizes_takes_the_whole_batch(
    feedapi: Feedapi, feedapi_publisher_factory: Make, store: Path
) -> None:
    publisher = feedapi_publisher_factory(1, page_size=6, checkpoint_every=6)
    publisher.extend(0, [{"n": n} for n in range(10)])
    cat = ("cat", publisher.url, "--store", store, "--limit", 4, "--page-size-hint", 6)
    assert len(_lines(feedapi(*cat))) == 6
    assert len(_lines(feedapi(*cat))) == 4


def test_a_limit_at_the_end_of_a_batch_commits_it(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    _lines(feedapi("cat", publisher.url, "--store", store, "--limit", 5))
    assert _lines(feedapi("cat", publisher.url, "--store", store)) == []


def test_from_beside_stored_cursors_is_noted(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    feedapi("cat", publisher.url, "--store", store)
    assert (
        "--from does not apply"
        in feedapi("cat", publisher.url, "--store", store, "--from", "first").stderr
    )


def test_a_selection_by_type(feedapi: Feedapi, publisher: Publisher) -> None:
    publisher.append(0, {"type": "odd", "n": 1})
    assert [
        line["data"]["n"] for line in _lines(feedapi("cat", publisher.url, "--event-type", "odd"))
    ] == [1]
    assert len(_lines(feedapi("cat", publisher.url, "--skip-event-type", "odd"))) == 5


def test_a_selection_by_filter(feedapi: Feedapi, feedapi_publisher_factory: Make) -> None:
    publisher = feedapi_publisher_factory(1, dialect="v2-draft", filters=("n",))
    publisher.extend(0, [{"n": n} for n in range(3)])
    assert [
        line["data"]["n"] for line in _lines(feedapi("cat", publisher.url, "--filter", "n=1"))
    ] == [1]


# ---------------------------------------------------------------------- --partition


@pytest.fixture
def split(feedapi_publisher_factory: Make) -> Publisher:
    """0 and 1, 0 split into 2 and 3, which start after it; one event in each."""
    publisher = feedapi_publisher_factory(2)
    publisher.append(0, {"p": 0})
    publisher.append(1, {"p": 1})
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.append(2, {"p": 2})
    publisher.append(3, {"p": 3})
    return publisher


def test_chosen_partitions_are_read_without_waiting_for_their_parents(
    feedapi: Feedapi, split: Publisher
) -> None:
    assert _lines(feedapi("cat", split.url, "-p", 2)) == [{"partition": 2, "data": {"p": 2}}]
    assert {line["partition"] for line in _lines(feedapi("cat", split.url, "-p", 2, "-p", 1))} == {
        1,
        2,
    }


@pytest.mark.usefixtures("short_waits")
def test_r8_a_chosen_child_is_read_after_its_chosen_parent(
    feedapi: Feedapi, split: Publisher
) -> None:
    assert [line["partition"] for line in _lines(feedapi("cat", split.url, "-p", 2, "-p", 0))] == [
        0,
        2,
    ]


def test_a_chosen_partition_is_read_from_a_v1_feed(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(3, dialect="v1")
    publisher.append(2, {"p": 2})
    assert _lines(feedapi("cat", publisher.url, "--v1-partitions", 3, "-p", 2)) == [
        {"partition": 2, "data": {"p": 2}}
    ]


def test_a_chosen_partition_that_the_feed_does_not_list_is_an_error(
    feedapi: Feedapi, split: Publisher
) -> None:
    result = feedapi("cat", split.url, "-p", 9)
    assert result.exit_code == 1
    assert "partition 9: the feed does not list this partition, only 0, 1, 2, 3" in result.stderr


@pytest.mark.usefixtures("short_waits")
def test_a_chosen_partition_keeps_its_cursor_and_leaves_the_others_alone(
    feedapi: Feedapi, split: Publisher, store: Path
) -> None:
    assert len(_lines(feedapi("cat", split.url, "--store", store, "-p", 1))) == 1
    assert _lines(feedapi("cat", split.url, "--store", store, "-p", 1)) == []
    assert _cursors(store) == {1: split.end_cursor(1)}
    assert (
        next(line["partition"] for line in _lines(feedapi("cat", split.url, "--store", store))) == 0
    )


@pytest.mark.usefixtures("short_waits")
def test_r9_a_stored_cursor_of_an_ancestor_is_not_skipped(
    feedapi: Feedapi, split: Publisher, store: Path
) -> None:
    _lines(feedapi("cat", split.url, "--store", store))
    split.split(1, into=(4, 5), method="cursor-from")
    result = feedapi("cat", split.url, "--store", store, "-p", 4)
    assert result.exit_code == 1
    assert "partition 4: is to take over the cursor that is stored for partition 1" in result.stderr


# ---------------------------------------------------------------------- errors


def test_a_store_that_is_no_database_is_reported_on_one_line(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    store.write_text("not a database, but long enough to be looked at as one " * 20)
    result = feedapi("cat", publisher.url, "--store", store)
    assert result.exit_code == 1
    assert "file is not a database" in result.stderr
    assert result.stderr.count("\n") == 1


def test_r17_a_fenced_consumer_is_reported_on_one_line(
    feedapi: Feedapi, publisher: Publisher, store: Path
) -> None:
    def advance(response: Any, request: Any, publisher: Publisher) -> Any:
        connection = sqlite3.connect(store)
        with connection:
            connection.execute("UPDATE feedapi_cursors SET revision = revision + 1")
        connection.close()
        return response

    publisher.fail(advance)
    result = feedapi("cat", publisher.url, "--store", store)
    assert result.exit_code == 1
    assert "another consumer named 'default' advanced this partition" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("short_waits")
def test_a_refused_fetch_is_reported_after_what_was_printed(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    publisher.fail(403, after=1, times=None)
    result = feedapi("cat", publisher.url)
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 3
    assert "403" in result.stderr.splitlines()[-1]


def test_r13_a_feed_without_progress_ends_with_an_error(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    publisher.fail(faults.SameCheckpoint(), times=None)
    result = feedapi("cat", publisher.url)
    assert result.exit_code == 1
    assert "no new cursor" in result.stderr
