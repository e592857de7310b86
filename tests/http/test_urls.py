"""URLs of a feed and of its requests. An impossible one is the same error everywhere (R19)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client import FeedClient, FeedConsumer, NegotiationError, SyncFeedClient
from feedapi_client.http.redaction import query_secrets
from feedapi_client.http.urls import FeedURL
from feedapi_client.spark.source_options import parse_options

IMPOSSIBLE = [
    "",
    "feed",
    "//u:sesame@a/",
    "ftp://a/feed?sesame",
    "http://",
    "http:///feed",
    "http:u:sesame@a",
    "http://u:sesame@/feed",
    "http://u:sesame@a:port/feed",
    "http://u:sesame@[::1/feed?k=sesame",
    "http://[fe80::sesame]/",
    "http://[::1]%eth0/?sesame",
    "http://sesame:80:90/",
    "http://u:sesame@a:99999/feed",
    "http://u:sesame@a:0/",
    "http://u:sesame@a:" + "9" * 5000 + "/",
    "http://u:sesame@a..b/feed",
    "http://u:sesame@.",
    f"http://u:sesame@{'a' * 64}.com/feed",
    f"http://u:sesame@{'a' * 70_000}",
    "http://u:sesame@a\0b/",
    "http://u:sesame@a b/",
    "http://u:sesame@a\n/feed",
    "http://u:sesame@%00/",
    "http://u:sesame@exa\u2100mple.com/",
    "http://us\u2100er:sesame@a/feed",
    "http://u:sesame@a/\ud800?sesame",
    "http://u:sesame@xn--\xff/",
    "http://u:sesame@\u202e.com/",
]
ENTRIES: list[Callable[[Any], object]] = [
    FeedClient,
    SyncFeedClient,
    FeedConsumer,
    lambda url: parse_options({"url": url}),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=["client", "sync", "consumer", "spark"])
@pytest.mark.parametrize("url", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_r19_an_impossible_url_is_refused_without_being_quoted(
    entry: Callable[[Any], object], url: str
) -> None:
    with pytest.raises(NegotiationError) as caught:
        entry(url)
    assert "sesame" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("entry", ENTRIES[:3], ids=["client", "sync", "consumer"])
@pytest.mark.parametrize("url", [None, b"http://a/", 7])
def test_a_url_is_a_string(entry: Callable[[Any], object], url: object) -> None:
    with pytest.raises(NegotiationError, match="must be a string"):
        entry(url)


@pytest.mark.parametrize("command", ["discover", "cat"])
def test_r19_the_command_line_refuses_an_impossible_url(command: str) -> None:
    url = "http://u:sesame@[::1/feed?k=sesame"
    done = subprocess.run(
        [sys.executable, "-m", "feedapi_client.cli", command, url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the feed's URL can't be read" in done.stderr
    assert "sesame" not in done.stdout + done.stderr


def test_the_url_of_a_request_that_is_repeated_is_read_once_unless_it_is_long() -> None:
    feed, other = FeedURL.parse("http://feed/x?a=1"), FeedURL.parse("http://u:b@feed/x?a=1")
    asked = [("partition", "1"), ("cursor", "ä&=")]
    target = feed.target("/events", asked)
    assert target == "/x/events?a=1&partition=1&cursor=%C3%A4%26%3D"
    assert feed.target("/events", asked, "b=2") == target.replace("a=1", "a=1&b=2")
    url = feed.request_url(target)
    assert str(url) == f"http://feed{target}"
    assert other.request_url(feed.target("/events", asked)) is url  # without credentials
    assert feed.request_url("/" + "c" * 10_000) is not feed.request_url("/" + "c" * 10_000)


def test_r19_what_a_query_holds_without_a_name_is_a_secret_too() -> None:
    assert query_secrets("K3y%2F1&tenant=a+b&=x") >= {"K3y%2F1", "K3y/1", "a+b", "a b", "x"}
