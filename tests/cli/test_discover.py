"""``feedapi discover``."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from feedapi_client.testing import Publisher, Quirks, faults
from tests.cli.conftest import Feedapi
from tests.cli.invoke import Row, play

Make = Callable[..., Publisher]
pytestmark = pytest.mark.usefixtures("feedapi", "short_waits")


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(2)
    publisher.append(0, {"entity": "a"})
    return publisher


@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
def test_json_holds_the_discovery(
    feedapi: Feedapi, feedapi_publisher_factory: Make, dialect: str
) -> None:
    publisher = feedapi_publisher_factory(1, dialect=dialect, stream=True)
    publisher.split(0, into=(1,), method="starts-after")
    found = orjson.loads(feedapi("discover", publisher.url, "--json").stdout)
    assert (found["feed"], found["dialect"], found["stream"]) == (publisher.url, dialect, True)
    assert found["token"] == (publisher.token if dialect == "v2-token" else None)
    names = ("id", "closed", "starts_after", "cursor_from")
    partitions = [tuple(each[name] for name in names) for each in found["partitions"]]
    assert partitions == [(0, True, None, []), (1, False, 0, [])]


def test_a_v1_feed_needs_the_number_of_partitions(feedapi_publisher_factory: Make) -> None:
    publisher = feedapi_publisher_factory(3, dialect="v1")
    rows = [
        Row("discover URL", 1, "v1_partitions"),
        Row("discover URL --v1-partitions 3", says="dialect v1"),
    ]
    play(rows, URL=publisher.url)


def test_what_is_no_discovery_is_reported_on_one_line(publisher: Publisher) -> None:
    publisher.fail(faults.Html(), on="discovery")
    play([Row("discover URL", 1, "Sign in")], URL=publisher.url)
    body = {"partitions": [{"id": "0", "closed": True, "lastCursor": "[red]\x1b[2J"}]}
    publisher.fail(faults.Replace(body), on="discovery")
    assert "\x1b" not in play([Row("discover URL", 1)], URL=publisher.url).output


def test_partitions_are_listed_with_what_they_follow(publisher: Publisher) -> None:
    publisher.split(0, into=(2,), method="starts-after")
    publisher.split(1, into=(4,), method="cursor-from")
    rows = [
        Row("discover URL", says="dialect v2-token · exactly once"),
        Row("discover URL", says="2\topen\t0\t\t\n4\topen\t\t1\t\n"),
    ]
    play(rows, URL=publisher.url)


def test_r8_a_missing_edge_is_given_to_who_reads(feedapi_publisher_factory: Make) -> None:
    publisher = feedapi_publisher_factory(1, quirks=Quirks(omit_parent_zero=True))
    publisher.append(0, {"n": 0})
    publisher.split(0, into=(1,), method="starts-after")
    publisher.append(1, {"n": 1})
    play(
        [Row("cat URL --raw --lineage 1:0", says='={"n":0}\n{"n":1}\n')],
        URL=publisher.url,
    )
