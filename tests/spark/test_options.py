"""The options: checked before anything starts, all problems in one line, no value quoted."""

from __future__ import annotations

import pickle

import pytest

from feedapi_client.options import FetchOptions
from feedapi_client.spark import environment
from feedapi_client.spark.auth import authorize
from feedapi_client.spark.environment import is_local, staging_location
from feedapi_client.spark.options import OPTION_NAMES, OptionError, SourceOptions, parse_options

URL = {"url": "https://service/feed"}


def problem(**options: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_options({**URL, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_url_alone_is_enough() -> None:
    options = parse_options(URL)
    assert options.start == "first"
    assert options.max_events_per_partition == 100_000
    assert options.fetch == FetchOptions()


def test_names_are_found_in_any_case() -> None:
    options = parse_options(
        {"URL": "https://service/feed", "MAXEVENTSPERPARTITION": "5", "pagesizehint": "7"}
    )
    assert options.max_events_per_partition == 5
    assert options.fetch.page_size_hint == 7


def test_the_path_of_load_is_the_url() -> None:
    assert parse_options({"path": "https://service/feed"}).url == "https://service/feed"
    assert "differ" in problem(path="https://other/feed")


def test_a_missing_url_is_said() -> None:
    with pytest.raises(OptionError, match="option url is missing"):
        parse_options({})


def test_every_problem_is_in_the_one_line() -> None:
    text = problem(maxEventsPerPartition="0", partition="3", ordered="perhaps")
    assert "maxEventsPerPartition must be at least 1" in text
    assert "unknown option partition (did you mean partitions?)" in text
    assert "ordered must be true or false" in text


def test_lists_and_ranges_of_partitions() -> None:
    assert parse_options({**URL, "partitions": "0, 3,8-10"}).partitions == {0, 3, 8, 9, 10}
    assert "numbers and ranges from 0 to 32767" in problem(partitions="0-40000")


@pytest.mark.parametrize(
    ("given", "start"),
    [("first", "first"), ("LAST", "last"), ('{"0": "abc", "7": "x"}', {0: "abc", 7: "x"})],
)
def test_where_to_start(given: str, start: object) -> None:
    assert parse_options({**URL, "startingCursors": given}).start == start


@pytest.mark.parametrize(
    "given", ["middle", "[1]", "{}", '{"a": "b"}', '{"0": 3}', '{"0": "\u00e6"}']
)
def test_where_not_to_start(given: str) -> None:
    assert "startingCursors must be first, last, or a JSON object" in problem(startingCursors=given)


def test_all_of_fetch_options_limits_and_retry_policy_can_be_given() -> None:
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


def test_what_the_option_objects_refuse_is_said_with_option_names() -> None:
    assert "eventTypes and skipEventTypes exclude each other" in problem(
        eventTypes="a", skipEventTypes="b"
    )
    assert "baseDelay must be positive and maxDelay not smaller" in problem(
        baseDelay="5", maxDelay="1"
    )


def test_an_endless_stream_is_refused() -> None:
    assert "number of milliseconds" in problem(stream="true")
    assert parse_options({**URL, "stream": "500"}).fetch.stream == 500


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


def test_options_travel_to_executors() -> None:
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


def test_a_bare_token_in_the_environment_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEED_TOKEN", "abc")
    assert authorized(authEnv="FEED_TOKEN").headers["Authorization"] == "Bearer abc"
    monkeypatch.setenv("FEED_TOKEN", "Basic abc")
    assert authorized(authEnv="FEED_TOKEN").headers["Authorization"] == "Basic abc"


def test_headers_from_values_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "abc")
    assert authorized(**{"header.X-Tenant": "7", "headerEnv.X-Api-Key": "API_KEY"}).headers == {
        "X-Tenant": "7",
        "X-Api-Key": "abc",
    }


def test_a_callable_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionError, match=r"no\.such\.module:token can't be imported"):
        authorized(authCallable="no.such.module:token")


# ---------------------------------------------------------------------- where epochs are staged


@pytest.mark.parametrize(
    ("master", "local"),
    [
        ("local", True),
        ("local[4]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://h:7077", False),
        ("yarn", False),
    ],
)
def test_which_masters_are_local(master: str, local: bool) -> None:
    assert is_local(master) is local


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "yarn", None])
def test_a_staging_location_is_required_unless_the_master_is_local(
    monkeypatch: pytest.MonkeyPatch, master: str | None
) -> None:
    monkeypatch.setattr(environment, "spark_master", lambda: master)
    assert staging_location("s3://bucket/x") == "s3://bucket/x"
    with pytest.raises(OptionError, match="option stagingLocation is missing"):
        staging_location(None)


def test_a_local_master_stages_in_a_folder_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "spark_master", lambda: "local[2]")
    assert staging_location(None).startswith("file://")


@pytest.mark.parametrize(
    ("arguments", "master"),
    [
        (
            [
                "java",
                "org.apache.spark.deploy.SparkSubmit",
                "--conf",
                "spark.master=local-cluster[2,1,1024]",
                "pyspark-shell",
            ],
            "local-cluster[2,1,1024]",
        ),
        (["java", "org.apache.spark.deploy.SparkSubmit", "--master", "yarn", "app.py"], "yarn"),
        (
            [
                "java",
                "-Dspark.master=k8s://x",
                "org.apache.spark.executor.CoarseGrainedExecutorBackend",
            ],
            "k8s://x",
        ),
        (["java", "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"], "local[*]"),
    ],
)
def test_the_master_is_read_off_the_command_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], master: str
) -> None:
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setattr(environment, "_command_line", lambda pid: arguments)
    assert environment.spark_master() == master


def test_a_source_options_object_needs_only_a_url() -> None:
    assert SourceOptions(url="https://service/feed").limits.max_poll_interval == 2.0
