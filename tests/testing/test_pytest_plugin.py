from __future__ import annotations

from collections.abc import Callable

import httpx

from feedapi_client.testing import Publisher, Quirks


def test_the_fixture_is_a_served_publisher(
    feedapi_publisher: Publisher, http: httpx.Client
) -> None:
    assert feedapi_publisher.url is not None
    assert http.get(feedapi_publisher.url).json()["partitions"] == [{"id": "0"}]


def test_the_factory_fixture_takes_the_arguments_of_a_publisher(
    feedapi_publisher_factory: Callable[..., Publisher], http: httpx.Client
) -> None:
    first = feedapi_publisher_factory((3, 5), dialect="v2-draft", quirks=Quirks(integer_ids=True))
    second = feedapi_publisher_factory()
    assert first.url != second.url
    assert http.get(first.url or "").json()["partitions"] == [{"id": 3}, {"id": 5}]
