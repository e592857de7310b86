"""``feedapi cat`` in this process: what is printed and what is stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.invoke import Invoked, Row, play

Make = Callable[..., Publisher]
Play = Callable[..., Invoked]
pytestmark = pytest.mark.usefixtures("feedapi", "short_waits")


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(1, page_size=3, checkpoint_every=2)
    publisher.extend(0, [{"type": "even" if n % 2 else "odd", "n": n} for n in range(1, 5)])
    return publisher


@pytest.fixture
def rows(publisher: Publisher, store: Path) -> Play:
    """Return a function that runs rows with these places."""
    before = publisher.end_cursor(0)
    publisher.append(0, "text\u2028")
    places = {
        "NOBODY": "http://127.0.0.1:9/feed",
        "BEFORE": before,
        "URL": publisher.url,
        "STORE": store,
        "END": publisher.end_cursor(0),
        "MOVED": str(publisher.url).replace("127.0.0.1", "localhost"),
    }
    return lambda *rows, **more: play(rows, **(places | more))


def cursors(store: Path) -> dict[int, str]:
    with closing(sqlite3.connect(store)) as connection:
        return dict(connection.execute("SELECT partition_id, feed_cursor FROM feedapi_cursors"))


ALL = "=1\n2\n3\n4\n5\n"
CASES = {
    "lines": [
        Row("cat URL -n 1", says='={"partition":0,"data":{"type":"even","n":1}}\n'),
        Row("cat URL -n 1 --raw", says='={"type":"even","n":1}\n'),
        Row("cat URL", says='{"partition":0,"data":"text\u2028"}\n'),
    ],
    "templates": [
        Row(r"cat URL --format '%p\t%i\n'", says="=0\t1\n0\t2\n0\t3\n0\t4\n0\t5\n"),
        Row(r"cat URL --format '%S %%\n' -n 1", says="=21 %\n"),
        Row("cat URL --format %h,", says="={},{},{},{},{},"),
        Row(r"cat URL --format '\\' -n 2", says="=\\\\"),
        Row(r"cat URL --format '%s\n' -n 1", says='={"type":"even","n":1}\n'),
        Row(r"cat URL --format '%c\n'", says="END\n"),
        Row("cat NOBODY --format %x", 2, "there is no verb %x"),
        Row(r"cat NOBODY --format '\q'", 2, r"there is no escape \q"),
        Row("cat NOBODY --format 100%", 2, "at the end"),
        Row("cat NOBODY --format %s --raw", 2, "can't be combined"),
    ],
    "from": [
        Row("cat URL --from last", says="="),
        Row("cat URL --partition 0 --from BEFORE --raw", says='="text\u2028"\n'),
        Row("cat URL --partition 0 --from END", says="="),
        Row("cat URL --from END", 2, "--from CURSOR needs one --partition"),
    ],
    "limit": [Row(r"cat URL --limit 4 --format '%i\n'", says="=1\n2\n3\n4\n")],
    "types": [
        Row("cat URL --event-type odd --format %i", says="=12"),
        Row("cat URL --skip-event-type odd --format %i", says="=123"),
        Row("cat URL --event-type a --skip-event-type b", 2, "exclude each other"),
        Row("cat URL --stream --page-size-hint 5", 2, "exclude each other"),
    ],
    "a store": [
        Row(r"cat URL --store STORE --format '%i\n'", says=ALL),
        Row("cat URL --store STORE", says="="),
        Row(r"cat URL --store STORE --name other --format '%i\n'", says=ALL),
        Row("cat URL --store STORE --from first", says="="),
        Row("cat URL --store STORE --feed-name ''", 2, "--feed-name"),
    ],
    "a feed with a name may move": [
        Row("cat URL --store STORE"),
        Row("cat URL --store STORE --feed-name payments", says="="),
        Row("cat MOVED --store STORE --feed-name payments", says="="),
    ],
    "a limit with a store ends at a cursor": [
        Row(
            "cat URL --store STORE --limit 2 --format %s",
            says='={"type":"even","n":1}{"type":"odd","n":2}',
        ),
        Row("cat URL --store STORE --limit 3 --format %i", says="=123"),
        Row("cat URL --store STORE", says="="),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_cat(rows: Play, case: str) -> None:
    rows(*CASES[case])


def test_payloads_are_those_of_the_publisher_byte_for_byte(
    feedapi_publisher_factory: Make, rows: Play
) -> None:
    publisher = feedapi_publisher_factory(1)
    payloads = [b'{ "a" : 1.0, "a":"\\u00e6" }', '"text\u2028"'.encode(), b"{}"]
    publisher.extend(0, payloads)
    lines = [payload.decode() for payload in payloads]
    rows(
        Row("cat OTHER --raw", says="=" + "".join(f"{line}\n" for line in lines)),
        Row(
            "cat OTHER", says="=" + "".join(f'{{"partition":0,"data":{line}}}\n' for line in lines)
        ),
        OTHER=publisher.url,
    )


def test_headers_of_a_v1_feed_are_printed(feedapi_publisher_factory: Make, rows: Play) -> None:
    publisher = feedapi_publisher_factory(2, dialect="v1")
    publisher.append(1, {"n": 1}, headers={"h": "x"})
    publisher.append(1, {"n": 2})
    cat = "cat OTHER --v1-partitions 2 --v1-header _all"
    both = '={"partition":1,"headers":{"h":"x"},"data":{"n":1}}\n{"partition":1,"data":{"n":2}}\n'
    rows(
        Row(cat, says=both),
        Row(f"{cat} -p 1 --format %h,", says='={"h":"x"},{},'),
        OTHER=publisher.url,
    )


@pytest.mark.parametrize(("hint", "runs"), [("", [4, 4, 2, 0]), (" --page-size-hint 6", [6, 4, 0])])
def test_r5_a_limit_with_a_store_ends_at_a_cursor_so_that_the_next_run_goes_on(
    feedapi_publisher_factory: Make, rows: Play, hint: str, runs: list[int]
) -> None:
    """Where the publisher gives none for so many events, with the whole batch."""
    publisher = feedapi_publisher_factory(1, page_size=6, checkpoint_every=6)
    publisher.extend(0, [{"n": n} for n in range(10)])
    cat = Row(f"cat OTHER --store STORE --limit 4{hint} --raw")
    assert [rows(cat, OTHER=publisher.url).stdout.count("\n") for _ in runs] == runs


def test_a_selection_by_filter_is_read_and_skipped(
    feedapi_publisher_factory: Make, rows: Play
) -> None:
    publisher = feedapi_publisher_factory(1, dialect="v2-draft", filters=("n",))
    publisher.extend(0, [{"n": n} for n in range(3)])
    rows(
        Row("cat OTHER --filter n=1 --raw", says='={"n":1}\n'),
        Row("cursors skip OTHER --filter n=1 --store STORE", says=": 1 event skipped, 1 posi"),
        Row("cat OTHER --filter n=1 --store STORE", says="="),
        OTHER=publisher.url,
    )


# ---------------------------------------------------------------------- --partition


def test_r8_r9_chosen_partitions_keep_their_cursors_and_leave_the_others_alone(
    publisher: Publisher, rows: Play, store: Path
) -> None:
    publisher.add(1)
    publisher.append(1, {})
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.append(2, {})
    rows(
        Row("cat URL -p 2 --format %p", says="=2"),  # without waiting for its parent
        Row("cat URL -p 2 -p 0 --format %p", says="=000002"),
        Row(
            "cat URL -p 9",
            1,
            "partition 9: the feed does not list this partition",
        ),
        Row("cat URL --store STORE -p 1 --format %p", says="=1"),
        Row("cat URL --store STORE -p 1", says="="),
    )
    assert cursors(store) == {1: publisher.end_cursor(1)}
    rows(Row("cat URL --store STORE --format %p", says="=000002"))
    publisher.split(1, into=(4, 5), method="cursor-from")
    stored = "partition 4: is to take over the cursor that is stored for partition 1"
    rows(Row("cat URL --store STORE -p 4", 1, stored))


def test_a_chosen_partition_is_read_from_a_v1_feed(
    feedapi_publisher_factory: Make, rows: Play
) -> None:
    publisher = feedapi_publisher_factory(3, dialect="v1")
    publisher.append(2, {})
    rows(Row("cat V1 --v1-partitions 3 -p 2 --format %p", says="=2"), V1=publisher.url)


# ---------------------------------------------------------------------- errors


def test_a_store_that_is_no_database_is_reported_on_one_line(rows: Play, store: Path) -> None:
    store.write_text("not a database, but long enough to be looked at as one " * 20)
    missing = store.parent / "no" / "folder"
    rows(
        Row("cat URL --store STORE", 1, "file is not a database"),
        Row("cat URL --store MISSING", 1, f"there is no folder {missing}"),
        MISSING=missing / "cursors.db",
    )


def test_r17_a_fenced_consumer_is_reported_on_one_line(
    publisher: Publisher, rows: Play, store: Path
) -> None:
    def advance(response: Any, request: Any, publisher: Publisher) -> Any:
        with closing(sqlite3.connect(store)) as connection, connection:
            connection.execute("UPDATE feedapi_cursors SET revision = revision + 1")
        return response

    publisher.fail(advance)
    said = "another consumer named 'default' advanced this partition"
    assert rows(Row("cat URL --store STORE", 1, said, input="")).stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "printed", "says"),
    [
        ({"fault": 403, "after": 1}, 3, "403"),
        ({"fault": faults.SameCheckpoint()}, 0, "no new cursor"),
    ],
)
def test_r13_a_failure_is_reported_after_what_was_printed(
    feedapi: Any, publisher: Publisher, fault: dict[str, Any], printed: int, says: str
) -> None:
    publisher.fail(**fault, times=None)
    result = feedapi("cat", publisher.url)
    assert (result.exit_code, says in result.stderr) == (1, True), result.output
    assert result.stdout.count("\n") == printed
