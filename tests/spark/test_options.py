"""Options: checked before anything starts, all problems in one line, no value quoted."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.spark.source_options import (
    OPTION_NAMES,
    OptionError,
    SourceOptions,
    parse_options,
)

URL = {"url": "https://service/feed"}
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "spark.md"


def problem(**options: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_options({**URL, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_url_is_the_only_required_option() -> None:
    options = parse_options(URL)
    assert options == SourceOptions(url="https://service/feed")
    assert options.fetch == FetchOptions()
    assert options.retry == RetryPolicy()
    limits = Limits(max_poll_interval=2.0, max_batch_bytes=4 << 20, slot_timeout=30.0)
    assert options.limits == limits
    assert parse_options({"path": "https://service/feed"}).url == "https://service/feed"
    with pytest.raises(OptionError, match="option url is missing"):
        parse_options({})


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"MAXEVENTSPERPARTITION": "5"}, "max_events_per_partition", 5),
        ({"partitions": "0, 3,8-10"}, "partitions", {0, 3, 8, 9, 10}),
        ({"startingCursors": "LAST"}, "starting_cursors", "last"),
        ({"startingCursors": '{"0": "a", "7": "x y"}'}, "starting_cursors", {0: "a", 7: "x y"}),
        ({"endingCursors": '{"0": "a"}'}, "ending_cursors", {0: "a"}),
        ({"lineage": "1:0, 2:none"}, "lineage", {1: 0, 2: None}),
        ({"ordered": "False"}, "ordered", False),
        ({"filter.Subject": "x"}, "filters", {"Subject": "x"}),
        ({"headerEnv.X-Key": "KEY"}, "header_env", {"X-Key": "KEY"}),
        (
            {"pagesizehint": "10", "eventTypes": "a;b", "v1Headers": "x,y", "filter.A": "1"},
            "fetch",
            FetchOptions(
                page_size_hint=10, event_types=["a", "b"], v1_headers=["x", "y"], filters={"A": "1"}
            ),
        ),
        ({"giveUpAfter": "None", "maxDelay": "7"}, "retry", RetryPolicy(max_delay=7)),
    ],
)
def test_text_becomes_a_value(given: dict[str, str], field: str, value: object) -> None:
    options = pickle.loads(pickle.dumps(parse_options({**URL, **given})))
    found = getattr(options, field)
    if isinstance(value, FetchOptions):
        assert found.selection() == value.selection()
        assert (found.page_size_hint, list(found.v1_headers)) == (10, ["x", "y"])
    else:
        assert found == value


def test_limits_are_options_and_the_longest_poll_is_no_shorter_than_the_first() -> None:
    limits = parse_options({**URL, "requestTimeout": "3.5", "pollInterval": "4"}).limits
    assert (limits.request_timeout, limits.poll_interval, limits.max_poll_interval) == (3.5, 4, 4)


def test_all_problems_are_in_one_line() -> None:
    text = problem(maxEventsPerPartition="0", partition="3", ordered="perhaps")
    assert "maxEventsPerPartition must be a whole number from 1" in text
    assert "unknown option partition (did you mean partitions?)" in text
    assert "ordered must be true or false" in text


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("path", "https://other/feed", "differ: give one of them"),
        ("url", "ftp://service", "must be an http or https URL"),
        ("partitions", "0-40000", "numbers and ranges from 0 to 32767"),
        ("partitions", "5-2", "numbers and ranges"),
        *(
            ("startingCursors", value, "must be first, last, or a JSON object")
            for value in ("middle", "[1]", "{}", '{"a": "b"}', '{"0": 3}', '{"0": "\u00e6"}')
        ),
        ("endingCursors", '{"99999": "a"}', "must be a JSON object"),
        ("lineage", "1-0", "must be pairs of child and parent"),
        ("eventTypes", ",", "must be names"),
        ("requestTimeout", "none", "number of seconds"),
        ("requestTimeout", "nan", "number of seconds"),
        ("availableNowTimeout", "1e300", "number of seconds"),
        ("maxConcurrentFetches", "none", "whole number"),
        ("maxLineBytes", str(3 << 30), "whole number from 1 to 2\\^30"),
        ("maxEventsPerPartition", str(2**63), "whole number"),
        ("feedName", "a\x1b", "is printable"),
        ("v1Partitions", "40000", "from 1 to 32768"),
        ("stagingLocation", " ", "not empty"),
    ],
)
def test_value_that_can_not_work_is_refused(option: str, value: str, expected: str) -> None:
    with pytest.raises(OptionError, match=f"option {option} .*{expected}|option url .*{expected}"):
        parse_options({**URL, option: value})


def test_values_that_do_not_fit_together_are_refused() -> None:
    assert "poll_interval must be positive" in problem(pollInterval="0")
    assert "max_delay (20.0) not smaller" in problem(baseDelay="50")


def test_options_that_exclude_each_other_are_named() -> None:
    text = problem(eventTypes="a", skipEventTypes="b", authEnv="A", authCallable="m:f")
    assert "event_types and skip_event_types exclude each other" in text
    assert "authEnv and authCallable exclude each other" in text


def test_r19_no_value_is_quoted() -> None:
    for options in (
        {"url": "https://user:hunter2@service"},
        {"header.Cookie": "hunter2"},
        {"header.X-Api-Key": "hunter2"},
        {"authCallable": "hunter2"},
    ):
        assert "hunter2" not in problem(**options)
    given = {"url": "https://a/feed?key=hunter2", "header.X-Tenant": "hunter2"}
    assert repr(parse_options(given)) == "<SourceOptions of a>"


def test_every_option_is_in_the_table_of_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Options")[2]
    first_cells = "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert sorted(re.findall(r"`([\w.]+)`", first_cells)) == OPTION_NAMES
