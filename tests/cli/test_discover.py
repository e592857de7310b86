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


def test_the_lineage_is_drawn_as_a_tree(feedapi: Feedapi, publisher: Publisher) -> None:
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.split(1, into=(4,), method="cursor-from")
    result = feedapi("discover", publisher.url)
    assert (result.exit_code, "dialect v2-token · exactly once" in result.stdout) == (0, True)
    lineage = result.stdout[result.stdout.index("lineage") :].splitlines()
    assert lineage[1:] == [
        "├── 0 closed",
        "│   ├── after ▸ 2 open",
        "│   └── after ▸ 3 open",
        "└── 1 no longer listed",
        "    └── cursor ▸ 4 open",
    ]


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


def test_r8_an_edge_that_seems_to_be_missing_is_reported_until_it_is_given(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(1, quirks=Quirks(omit_parent_zero=True))
    publisher.append(0, {"n": 0})
    publisher.split(0, into=(1,), method="starts-after")
    publisher.append(1, {"n": 1})
    rows = [
        Row("discover URL", says="suspected: partition 0 closed without a child"),
        Row("discover URL", says="--lineage 1:0"),
        Row("discover URL --lineage 1:0", says="└── after (--lineage) ▸ 1 open"),
        Row("discover URL --lineage 7:0", 1, "it is not listed"),
        Row("cat URL --raw --lineage 1:0", says='={"n":0}\n{"n":1}\n'),
    ]
    play(rows, URL=publisher.url)
    found = orjson.loads(feedapi("discover", publisher.url, "--json").stdout)
    assert found["suspected_missing_edges"] == {"parents": [0], "children": [1]}
    given = feedapi("discover", publisher.url, "--json", "--lineage", "1:0").stdout
    assert orjson.loads(given)["suspected_missing_edges"] is None
    assert orjson.loads(given)["partitions"][1]["starts_after"] == 0
