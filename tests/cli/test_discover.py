"""``feedapi discover``."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from feedapi_client.testing import Publisher, faults
from tests.cli.conftest import Feedapi

Make = Callable[..., Publisher]


@pytest.fixture
def publisher(feedapi_publisher_factory: Make) -> Publisher:
    publisher = feedapi_publisher_factory(2)
    publisher.append(0, {"entity": "a"})
    return publisher


def test_the_lineage_is_drawn_as_a_tree(feedapi: Feedapi, publisher: Publisher) -> None:
    publisher.split(0, into=(2, 3), method="starts-after")
    publisher.split(1, into=(4,), method="cursor-from")
    result = feedapi("discover", publisher.url)
    assert result.exit_code == 0
    assert "dialect v2-token · exactly once" in result.stdout
    lineage = result.stdout[result.stdout.index("lineage") :].splitlines()
    assert lineage[1:] == [
        "├── 0  closed",
        "│   ├── after ▸ 2  open",
        "│   └── after ▸ 3  open",
        "└── 1  no longer listed",
        "    └── cursor ▸ 4  open",
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
    assert [
        (p["id"], p["closed"], p["starts_after"], p["cursor_from"]) for p in found["partitions"]
    ] == [(0, True, None, []), (1, False, 0, [])]


def test_a_v1_feed_needs_the_number_of_partitions(
    feedapi: Feedapi, feedapi_publisher_factory: Make
) -> None:
    publisher = feedapi_publisher_factory(3, dialect="v1")
    refused = feedapi("discover", publisher.url)
    assert refused.exit_code == 1
    assert "v1_partitions" in refused.stderr
    assert "dialect v1" in feedapi("discover", publisher.url, "--v1-partitions", 3).stdout


def test_an_unreachable_feed_is_reported_on_one_line(feedapi: Feedapi) -> None:
    result = feedapi("discover", "http://127.0.0.1:1/feed", "--give-up-after", 0)
    assert result.exit_code == 1
    assert result.stderr.startswith("feedapi: feed http://127.0.0.1:1/feed: ")
    assert result.stderr.count("\n") == 1


def test_an_html_page_is_reported_on_one_line(feedapi: Feedapi, publisher: Publisher) -> None:
    publisher.fail(faults.Html(), on="discovery")
    result = feedapi("discover", publisher.url)
    assert result.exit_code == 1
    assert "Sign in" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_impossible_url_is_reported_on_one_line(feedapi: Feedapi) -> None:
    result = feedapi("discover", "localhost:8080/feed")
    assert result.exit_code == 2
    assert "the feed's URL must begin with http:// or https:// and name a host" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_authorization_header_comes_from_the_environment(
    feedapi: Feedapi, feedapi_publisher_factory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = feedapi_publisher_factory(1, bearer="secret-token")
    refused = feedapi("discover", publisher.url)
    assert refused.exit_code == 1
    assert "401" in refused.stderr
    monkeypatch.setenv("FEED_AUTH", "Bearer secret-token")
    assert feedapi("discover", publisher.url, "--auth-env", "FEED_AUTH").exit_code == 0
    assert (
        feedapi("discover", publisher.url, "--header-env", "Authorization=FEED_AUTH").exit_code == 0
    )


def test_r19_a_wrong_authorization_header_is_not_shown(
    feedapi: Feedapi, feedapi_publisher_factory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = feedapi_publisher_factory(1, bearer="other")
    monkeypatch.setenv("FEED_AUTH", "Bearer hidden-value")
    wrong = feedapi("discover", publisher.url, "--auth-env", "FEED_AUTH")
    assert wrong.exit_code == 1
    monkeypatch.setenv("FEED_AUTH", "Bearer hidden-välue")
    unsendable = feedapi("discover", publisher.url, "--auth-env", "FEED_AUTH")
    assert unsendable.exit_code == 2
    assert "hidden" not in wrong.output + unsendable.output


def test_r21_control_characters_of_a_cursor_do_not_reach_the_terminal(
    feedapi: Feedapi, publisher: Publisher
) -> None:
    body = {"partitions": [{"id": "0", "closed": True, "lastCursor": "[red]\x1b[2J"}]}
    publisher.fail(faults.Replace(body), on="discovery")
    result = feedapi("discover", publisher.url)
    assert "\x1b" not in result.output
