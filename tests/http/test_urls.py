"""URLs of a feed and of its requests. An impossible one is the same error everywhere (R19)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client import FeedClient, FeedConsumer, NegotiationError, SyncFeedClient
from feedapi_client.http.urls import FeedURL, RequestURLs, feed_urls
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


def test_the_url_of_a_request_that_is_repeated_is_read_once() -> None:
    urls = RequestURLs(FeedURL.parse("http://feed/x?a=1"))
    asked = [("partition", "1"), ("cursor", "ä&=")]
    url = urls.url("/events", asked, "")
    assert str(url) == "http://feed/x/events?a=1&partition=1&cursor=%C3%A4%26%3D"
    assert urls.url("/events", list(asked), "") is url
    assert urls.url("/events", asked, "b=2") != url
    assert urls.url("", asked, "") != url
    assert urls.url("/events", [("partition", "1"), ("cursor", "b")], "") != url


def test_remembered_urls_are_bounded_in_number_and_length() -> None:
    urls = RequestURLs(FeedURL.parse("http://feed/"))
    long = [("cursor", "c" * 10_000)]
    assert urls.url("", long, "") is not urls.url("", long, "")
    first = urls.url("", [("cursor", "0")], "")
    for number in range(1, 10_000):
        urls.url("", [("cursor", str(number))], "")
    assert urls.url("", [("cursor", "0")], "") is not first


def test_clients_of_one_feed_share_the_urls_of_its_requests() -> None:
    first, second = (FeedClient("http://feed/shared").transport for _ in "ab")
    asked = [("cursor", "5")]
    assert first.request("", asked).url is second.request("", asked).url
    assert SyncFeedClient("http://feed/shared").transport.request("", asked).url is (
        first.request("", asked).url
    )


def test_feeds_that_differ_in_credentials_or_query_share_no_urls() -> None:
    one, other, third = (
        feed_urls(url) for url in ("http://u:a@feed/", "http://u:b@feed/", "http://u:a@feed/?k=1")
    )
    assert one.feed.basic_auth == ("u", "a")
    assert other.feed.basic_auth == ("u", "b")
    assert len({id(one), id(other), id(third)}) == 3
    assert feed_urls("http://u:a@feed/") is one


def test_the_urls_of_the_last_few_feeds_are_remembered() -> None:
    first = feed_urls("http://feed/0")
    for number in range(1, 4):
        feed_urls(f"http://feed/{number}")
    assert feed_urls("http://feed/0") is first
    for number in range(1, 5):
        feed_urls(f"http://feed/{number}")
    assert feed_urls("http://feed/0") is not first
