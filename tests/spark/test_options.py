"""Options: checked before anything starts, all problems in one line, no value quoted."""

from __future__ import annotations

import pickle

import httpx
import pytest

from feedapi_client.errors import AuthenticationError
from feedapi_client.options import FetchOptions
from feedapi_client.spark.http_clients import authorize
from feedapi_client.spark.source_options import (
    OPTION_NAMES,
    OptionError,
    SourceOptions,
    parse_options,
)
from tests.spark import credentials

URL = {"url": "https://service/feed"}


def problem(**options: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_options({**URL, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_url_is_the_only_required_option() -> None:
    options = parse_options(URL)
    assert options.start == "first"
    assert options.max_events_per_partition == 100_000
    assert options.fetch == FetchOptions()


def test_option_names_ignore_case() -> None:
    options = parse_options(
        {"URL": "https://service/feed", "MAXEVENTSPERPARTITION": "5", "pagesizehint": "7"}
    )
    assert options.max_events_per_partition == 5
    assert options.fetch.page_size_hint == 7


def test_path_of_load_is_the_url() -> None:
    assert parse_options({"path": "https://service/feed"}).url == "https://service/feed"
    assert "differ" in problem(path="https://other/feed")


def test_missing_url_is_an_error() -> None:
    with pytest.raises(OptionError, match="option url is missing"):
        parse_options({})


def test_all_problems_are_in_one_line() -> None:
    text = problem(maxEventsPerPartition="0", partition="3", ordered="perhaps")
    assert "maxEventsPerPartition must be at least 1" in text
    assert "unknown option partition (did you mean partitions?)" in text
    assert "ordered must be true or false" in text


def test_partitions_are_lists_and_ranges() -> None:
    assert parse_options({**URL, "partitions": "0, 3,8-10"}).partitions == {0, 3, 8, 9, 10}
    assert "numbers and ranges from 0 to 32767" in problem(partitions="0-40000")


@pytest.mark.parametrize(
    ("given", "start"),
    [("first", "first"), ("LAST", "last"), ('{"0": "abc", "7": "x"}', {0: "abc", 7: "x"})],
)
def test_start_positions(given: str, start: object) -> None:
    assert parse_options({**URL, "startingCursors": given}).start == start


@pytest.mark.parametrize(
    "given", ["middle", "[1]", "{}", '{"a": "b"}', '{"0": 3}', '{"0": "\u00e6"}']
)
def test_invalid_start_positions(given: str) -> None:
    assert "startingCursors must be first, last, or a JSON object" in problem(startingCursors=given)


def test_fetch_options_limits_and_retry_policy_are_options() -> None:
    options = parse_options(
        {
            **URL,
            "pageSizeHint": "10",
            "eventTypes": "a;b",
            "v1Headers": "x,y",
            "maxLineBytes": "1000",
            "maxBufferedBytes": "5000",
            "requestTimeout": "3.5",
            "giveUpAfter": "none",
            "maxDelay": "7",
        }
    )
    assert options.fetch == FetchOptions(
        page_size_hint=10, event_types=("a", "b"), v1_headers=("x", "y")
    )
    assert (
        options.limits.max_line_bytes,
        options.limits.max_buffered_bytes,
        options.limits.request_timeout,
    ) == (1000, 5000, 3.5)
    assert (options.retry.give_up_after, options.retry.max_delay) == (None, 7)


def test_errors_of_option_objects_use_option_names() -> None:
    assert "eventTypes and skipEventTypes exclude each other" in problem(
        eventTypes="a", skipEventTypes="b"
    )
    assert "baseDelay (5.0) must be positive, and maxDelay (1.0) not smaller" in problem(
        baseDelay="5", maxDelay="1"
    )


def test_r19_no_value_is_quoted() -> None:
    for options in (
        {"url": "https://user:hunter2@service"},
        {"header.Cookie": "hunter2"},
        {"header.X-Api-Key": "hunter2"},
        {"authCallable": "hunter2"},
    ):
        assert "hunter2" not in problem(**options)
    assert "hunter2" not in repr(
        parse_options({"url": "https://service/feed?key=hunter2", "header.X-Tenant": "hunter2"})
    )


def test_options_are_picklable() -> None:
    options = parse_options(
        {**URL, "partitions": "1", "filter.subject": "x", "startingCursors": '{"1": "c"}'}
    )
    again = pickle.loads(pickle.dumps(options))
    assert again == options


def test_every_option_is_listed_once() -> None:
    assert len(set(OPTION_NAMES)) == len(OPTION_NAMES)
    assert {
        "url",
        "startingCursors",
        "filter.NAME",
        "header.NAME",
        "headerEnv.NAME",
        "maxPollInterval",
        "giveUpAfter",
    } <= set(OPTION_NAMES)


# ---------------------------------------------------------------------- credentials


class Http:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.auth: object = "before"


def authorized(**options: str) -> Http:
    http = Http()
    authorize(http, parse_options({**URL, **options}))
    return http


def test_token_without_scheme_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEED_TOKEN", "abc")
    assert authorized(authEnv="FEED_TOKEN").headers["Authorization"] == "Bearer abc"
    monkeypatch.setenv("FEED_TOKEN", "Basic abc")
    assert authorized(authEnv="FEED_TOKEN").headers["Authorization"] == "Basic abc"


def test_headers_come_from_values_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "abc")
    assert authorized(**{"header.X-Tenant": "7", "headerEnv.X-Api-Key": "API_KEY"}).headers == {
        "X-Tenant": "7",
        "X-Api-Key": "abc",
    }


def test_callable_may_be_of_a_class() -> None:
    http = authorized(authCallable="tests.spark.credentials:Tokens.get")
    assert http.headers["Authorization"] == "Bearer s3cr3t-t0ken"


def test_callable_is_called_again_when_its_token_is_refused() -> None:
    valid = ["Bearer token-1"]
    credentials.issued = 0

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.headers["Authorization"] == valid[0] else 401)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        authorize(http, parse_options({**URL, "authCallable": "tests.spark.credentials:rotated"}))
        assert http.get("http://h/f").status_code == 200
        valid[0] = "Bearer token-2"
        assert [http.get("http://h/f").status_code for _ in range(3)] == [200, 200, 200]
        assert credentials.issued == 2
        valid[0] = "of somebody else"
        assert http.get("http://h/f").status_code == 401
        assert credentials.issued == 3


def test_token_that_is_renewed_and_cannot_be_sent_is_named_and_not_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(401))
    with httpx.Client(transport=transport) as http:
        authorize(http, parse_options({**URL, "authCallable": "tests.spark.credentials:rotated"}))
        monkeypatch.setattr(http.auth, "_function", lambda: "hunter2-é")
        with pytest.raises(AuthenticationError, match=r"authCallable .* printable ASCII") as found:
            http.get("http://h/f")
    assert "hunter2" not in str(found.value)
    assert found.value.__cause__ is None


@pytest.mark.parametrize("path", ["no.such.module:token", "tests..spark:token", "tests.2x:token"])
def test_callable_that_cannot_be_imported_is_named(path: str) -> None:
    with pytest.raises(OptionError, match=f"option authCallable: {path} can't be imported"):
        authorized(authCallable=path)


def test_source_options_need_only_a_url() -> None:
    limits = SourceOptions(url="https://service/feed").limits
    assert (limits.max_poll_interval, limits.slot_timeout) == (2.0, 30.0)


def test_r08_lineage_is_given_as_pairs_of_child_and_parent() -> None:
    assert parse_options({"url": "http://h/f", "lineage": "1:0, 2:0"}).lineage == {1: 0, 2: 0}
    with pytest.raises(OptionError, match="option lineage must be pairs of child and parent"):
        parse_options({"url": "http://h/f", "lineage": "1-0"})


def test_representation_names_the_host_only() -> None:
    options = parse_options({"url": "https://a/feed?key=hunter2"})
    assert repr(options) == "<SourceOptions of a>"


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        *((name, "none", "number of seconds") for name in ("refusedFor", "baseDelay", "maxDelay")),
        ("maxRetryAfter", "none", "number of seconds"),
        ("requestTimeout", "none", "number of seconds"),
        ("requestTimeout", "inf", "at most"),
        ("requestTimeout", "nan", "must not be negative"),
        ("availableNowTimeout", "1e300", "at most"),
        ("maxConcurrentFetches", "none", "whole number"),
        ("maxBatchBytes", str(3 << 30), f"at most {1 << 30}"),
        ("maxLineBytes", str(3 << 30), f"at most {1 << 30}"),
        ("maxEventsPerPartition", str(2**63), "at most"),
        ("feedName", " ", "text of 1 to"),
        ("feedName", "a\x1b", "is printable"),
        ("v1Partitions", "40000", "at most 32768"),
    ],
)
def test_value_that_can_not_work_is_refused(option: str, value: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"option {option} .*{problem}"):
        parse_options({**URL, option: value})


def test_fields_that_may_be_none_take_it_and_others_numbers() -> None:
    options = parse_options({**URL, "giveUpAfter": "none", "maxBatchEvents": "None"})
    assert (options.retry.give_up_after, options.limits.max_batch_events) == (None, None)
    assert parse_options({**URL, "maxBatchEvents": "7"}).limits.max_batch_events == 7


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("startingTimestamp", r"where\(...\) on a time in column data"),
        ("eventTime", r"where\(...\) on a time in column data"),
        ("eventTimeUnit", r"where\(...\) on a time in column data"),
        ("missingEventTime", r"where\(...\) on a time in column data"),
        ("payload", r"try_parse_json\(data\)"),
        ("minEventsPerTrigger", "processing-time trigger"),
        ("maxTriggerDelay", "processing-time trigger"),
        ("urls", r"load each feed with url, .* union"),
        ("feedColumn", r"withColumn\("),
        ("pushFilters", "option partitions"),
        ("previousUrl", "feedName"),
        ("stream", "maxPollInterval"),
        ("maxRequestsPerSecond", "maxConcurrentFetches"),
        ("forbiddenPayloads", "column data"),
        ("fenced", "lease"),
        ("caCertificates", "caFile"),
        ("URLS", r"union"),
    ],
)
def test_option_that_is_gone_says_what_to_write_instead(option: str, instead: str) -> None:
    with pytest.raises(OptionError, match=f"option {option} is gone: .*{instead}"):
        parse_options({**URL, option: "x"})


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("subscribe", "a feed is named by url"),
        ("minPartitions", "maxPartitionsPerTask"),
        ("endingOffsets", "ends where the feed ends when it starts"),
        ("maxOffsetsPerTrigger", "maxEventsPerTrigger"),
        ("kafka.bootstrap.servers", "a feed is read over HTTP"),
    ],
)
def test_r10_option_of_the_kafka_source_gets_a_hint(option: str, hint: str) -> None:
    with pytest.raises(OptionError, match=hint) as caught:
        parse_options({"url": "http://x/feed", option: "x"})
    assert "did you mean" not in str(caught.value)
