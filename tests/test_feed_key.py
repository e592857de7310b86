"""`FeedKey`: whose cursors these are, without collisions and without secrets."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from feedapi_client import FeedConsumer, FeedKey, NegotiationError
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RecordingStore

SECRET = "0123456789abcdef"
URL = "https://user:hunter2@Service.test/feed"

parts = st.text(st.characters(codec="utf-8"), max_size=4)
keys = st.builds(
    FeedKey,
    st.just("https://service.test/feed"),
    parts,
    st.dictionaries(parts, parts, max_size=3),
)


@given(keys, keys)
def test_different_keys_have_different_ids(one: FeedKey, other: FeedKey) -> None:
    assume(one != other)
    assert one.id != other.id
    assert len(one.id) == 64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a\x00b", ()), ("a", (("b", ""),))),
        (("a", (("b\x00c", "d"),)), ("a", (("b", "c\x00d"),))),
        (("a", (("b", "c"), ("d", "e"))), ("a", (("b", "c\x00d\x00e"),))),
        (("1:a", ()), ("1", ((":a", ""),))),
    ],
)
def test_joined_parts_do_not_collide(one: tuple[str, object], other: tuple[str, object]) -> None:
    assert FeedKey(URL, *one).id != FeedKey(URL, *other).id


@pytest.mark.parametrize(
    "query",
    [f"sha256={SECRET}", f"token={SECRET}", f"sha256={SECRET}&a=b", f"sha256={SECRET}#x"],
)
def test_r19_a_query_never_passes_for_the_digest_of_a_key(query: str) -> None:
    key = FeedKey(f"{URL}?{query}", "name")
    assert SECRET not in key.url
    assert SECRET not in str(key)
    assert "hunter2" not in repr(key)
    digest = hashlib.sha256(query.partition("#")[0].encode()).hexdigest()[:16]
    assert key.url == f"https://service.test/feed#sha256={digest}"


def test_the_url_of_a_key_makes_the_same_key_again() -> None:
    for url in (URL, f"{URL}?tenant=1", f"{URL}#part"):
        key = FeedKey(url, "name", {"a": "b"})
        assert FeedKey(key.url, key.name, key.filters) == key
    assert FeedKey(f"{URL}#part").url == "https://service.test/feed"
    assert FeedKey(f"{URL}?tenant=1").id != FeedKey(f"{URL}?tenant=2").id


@pytest.mark.parametrize(
    "url",
    [
        "",
        "feed",
        "ftp://host/feed",
        "http://",
        "https:///feed",
        "http://[::1/feed",
        "http://user:hunter2@[bad]/feed",
        "http://user:hunter2@host:99999/feed",
        "http://user:hunter2@host:port/feed",
        None,
        b"http://host/feed",
    ],
)
def test_an_impossible_url_is_an_error_that_quotes_nothing(url: str) -> None:
    for make in (FeedKey, FeedConsumer):
        with pytest.raises(NegotiationError) as caught:
            make(url)
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in repr(caught.value.__cause__)


@pytest.mark.anyio
async def test_r19_a_query_in_the_form_of_a_digest_is_not_stored() -> None:
    store = RecordingStore()
    publisher = Publisher(1)
    with publisher.serve():
        url = f"{publisher.url}?sha256={SECRET}"
        async with FeedConsumer(url, store=store) as consumer:
            assert SECRET not in repr(consumer)
            assert SECRET not in consumer.status().feed
        (key,) = await store.feeds()
    assert SECRET not in str(key)
