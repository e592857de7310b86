"""What the keys of a store say to a consumer that finds no position of its own (R7)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from feedapi_client import FeedKey, StoreError
from feedapi_client.stores.moving import first_start

SELECTION = {"filter-a": "b"}
HERE = FeedKey("https://here.test/feed?tenant=1", "app", SELECTION)
NAMED = FeedKey.named("orders", "app", SELECTION)


def key(url: str, selection: dict[str, str] | None = None, name: str = "app") -> FeedKey:
    return FeedKey(url, name, SELECTION if selection is None else selection)


SAME = {
    "another host": key("https://former.test/feed?tenant=1"),
    "another scheme": key("http://here.test/feed?tenant=1"),
    "another port": key("https://here.test:8443/feed?tenant=1"),
    "a credential less in the query of another origin": key("https://former.test/feed"),
    "a slash more": key("https://here.test/feed/?tenant=1"),
    "another host and a slash more": key("https://former.test/feed/"),
    "another selection": key("https://here.test/feed?tenant=1", {"event-types": "paid"}),
    "no selection": key("https://here.test/feed?tenant=1", {}),
    "another selection at another host": key("https://former.test/feed", {}),
    "a feed name": FeedKey.named("orders", "app", SELECTION),
}
OTHERS = {
    "another path": key("https://former.test/other"),
    "a longer path": key("https://here.test/feed/more?tenant=1"),
    "another consumer": key("https://former.test/feed", name="other"),
}


@pytest.mark.parametrize("stored", SAME.values(), ids=SAME)
def test_r07_what_looks_like_the_same_feed_is_refused_with_the_command(stored: FeedKey) -> None:
    refused = first_start(HERE, [stored])
    assert isinstance(refused, StoreError)
    command = f"feedapi cursors move {shlex.quote(stored.url)} 'https://here.test/feed?...' --name"
    assert command in str(refused)
    assert 'start="first"' in str(refused)
    assert ("--selection" in str(refused)) == (stored.filters != HERE.filters)


@pytest.mark.parametrize("stored", OTHERS.values(), ids=OTHERS)
def test_r07_another_feed_is_none_of_it(stored: FeedKey) -> None:
    assert first_start(HERE, [stored]) is None


def test_r07_another_query_is_another_feed_and_is_told() -> None:
    other = key("https://here.test/feed?tenant=2")
    told = first_start(HERE, [other])
    assert isinstance(told, str)
    assert f"some of 1 others that look like it, such as {other.url}" in told
    moved = key("https://former.test/feed?tenant=1")
    refused = first_start(HERE, [other, moved])
    assert isinstance(refused, StoreError)
    assert other.url not in str(refused)


def test_r07_two_origins_with_that_path_are_several_feeds() -> None:
    stored = [key(f"https://service-{n}.test/feed") for n in range(20)]
    assert first_start(stored[0], []) is None
    assert isinstance(first_start(stored[1], stored[:1]), StoreError)
    for n in range(2, 20):
        warned = first_start(stored[n], stored[:n])
        assert isinstance(warned, str)
        assert f"some of {n} others that look like it" in warned


def test_r07_another_selection_of_the_very_address_is_refused_beside_several_feeds() -> None:
    stored = [key("https://a.test/feed"), key("https://b.test/feed")]
    refused = first_start(key("https://a.test/feed/", {}), stored)
    assert isinstance(refused, StoreError)
    assert "move https://a.test/feed https://a.test/feed/ --name app --selection" in str(refused)
    assert "b.test" not in str(refused)


@pytest.mark.parametrize(
    ("stored", "refused"),
    [
        ([FeedKey.named("orders", "app")], True),
        ([key("https://here.test/feed?tenant=1", {})], True),
        ([key("https://former.test/feed")], True),
        ([FeedKey.named("payments", "app", SELECTION)], False),
        ([key("https://former.test/other")], False),
    ],
)
def test_r07_a_feed_name_that_is_added_counts_as_its_url(
    stored: list[FeedKey], refused: bool
) -> None:
    found = first_start(NAMED, stored, by_url=HERE)
    assert isinstance(found, StoreError) == refused
    assert not refused or " feed:orders --name app" in str(found)


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ([NAMED], StoreError),
        ([NAMED, FeedKey.named("payments", "app")], str),
        ([NAMED, key("https://here.test/other")], type(None)),
    ],
)
def test_r07_a_feed_name_that_is_given_up(stored: Sequence[FeedKey], kind: type) -> None:
    found = first_start(HERE, stored)
    assert isinstance(found, kind)
    assert ("or give feed_name='orders' as before" in str(found)) == (kind is StoreError)


def test_r21_the_message_is_escaped_and_cut() -> None:
    found = FeedKey("https://former.test/feed", "\x1b[2J" + "n" * 10_000)
    refused = str(first_start(FeedKey("https://here.test/feed", found.name), [found]))
    assert refused.isprintable()
    assert "\\x1b[2J" in refused
    assert len(refused) < 1_500
