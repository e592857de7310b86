"""What is wrong is refused at once, where it is given, and before anything is read."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import anyio
import httpx
import pytest

from feedapi_client import (
    Batch,
    FeedClient,
    FeedConsumer,
    FetchOptions,
    Limits,
    Quarantine,
    Retry,
    RetryPolicy,
    Share,
    SQLiteCursorStore,
    SyncFeedClient,
)
from feedapi_client.arguments import parse_lineage
from tests.consumer.helpers import SAFETY_LIMIT, LocalFeed

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

URL = "http://feed/feed"


def not_async(batch: Batch) -> None:
    raise AssertionError("is never called")


async def yields(batch: Batch) -> Any:
    yield batch


class NotAsync:
    def __call__(self, batch: Batch) -> None: ...

    def method(self, batch: Batch) -> None: ...


class Async:
    async def __call__(self, batch: Batch) -> None: ...

    async def method(self, batch: Batch) -> None: ...


async def handles(batch: Batch) -> None: ...


async def with_database(database: str, batch: Batch) -> None: ...


def returns_a_coroutine(batch: Batch) -> Awaitable[None]:
    return handles(batch)


def decorated(handle: Callable[[Batch], Awaitable[None]]) -> Callable[[Batch], Awaitable[None]]:
    @functools.wraps(handle)
    def wrapper(batch):  # type: ignore[no-untyped-def]
        return handle(batch)

    return wrapper


class InAThread:
    """As asgiref's `sync_to_async`: it wraps a plain function, and is asynchronous itself."""

    def __init__(self, function: Callable[[Batch], None]) -> None:
        functools.update_wrapper(self, function)

    def __get__(self, parent: object, _: type) -> Any:
        return functools.partial(self, parent)

    async def __call__(self, batch: Batch) -> None: ...


REFUSED = [
    not_async,
    functools.partial(not_async),
    yields,
    NotAsync(),
    NotAsync().method,
    Async,
    None,
    "module:handle",
]
ACCEPTED = [
    handles,
    functools.partial(with_database, "database"),
    Async(),
    Async().method,
    returns_a_coroutine,
    decorated(handles),
    AsyncMock(),
    InAThread(not_async),
    lambda batch: handles(batch),  # noqa: PLW0108 - a lambda is what is tested
]


def five_events() -> LocalFeed:
    feed = LocalFeed()
    feed.numbers(0, *range(5))
    return feed


each_policy = pytest.mark.parametrize("on_failure", ["raise", "retry", "quarantine"])


@each_policy
@pytest.mark.parametrize(
    ("handle", "text"),
    [*((handle, "the handler must") for handle in REFUSED), ("counts its calls", "returned None")],
)
async def test_a_handler_without_async_is_refused_and_moves_no_cursor(
    handle: Any, text: str, on_failure: Any
) -> None:
    """What only a call shows is called once."""
    feed, calls = five_events(), []
    if handle == "counts its calls":
        handle = calls.append
    async with feed.consume(follow=False) as consumer:
        before = await feed.store.positions()
        with pytest.raises(TypeError, match=text), anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle, on_failure=on_failure)
        assert await feed.store.positions() == before
    assert len(calls) == (1 if text == "returned None" else 0)


@pytest.mark.parametrize("handle", ACCEPTED)
async def test_every_form_of_an_async_handler_is_accepted(handle: Any) -> None:
    async with five_events().consume(follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
        assert consumer.status().partitions[0].caught_up


@pytest.mark.parametrize("max_concurrency", [0, -1, 1.5, True, "4", None])
async def test_an_impossible_max_concurrency_is_refused(max_concurrency: Any) -> None:
    async with LocalFeed().consume() as consumer:
        with pytest.raises((TypeError, ValueError), match="max_concurrency must be"):
            await consumer.run(handles, max_concurrency=max_concurrency)


async def test_an_impossible_policy_or_grace_period_is_refused() -> None:
    async with LocalFeed().consume() as consumer:
        with pytest.raises(ValueError, match="on_failure must be"):
            await consumer.run(handles, on_failure="quarantined")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="grace must be"):
            consumer.stop(grace=-1)


def test_a_text_is_not_shown_where_a_store_is_expected() -> None:
    with pytest.raises(TypeError, match=r"store must be .* not a str") as caught:
        FeedConsumer(URL, store="postgresql://user:secret@db/app")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


WRONG: list[dict[str, Any]] = [
    {"store": "cursors.db"},
    {"store": SQLiteCursorStore},
    {"store": object()},
    {"name": ""},
    {"name": None},
    {"name": 7},
    {"start": "latest"},
    {"start": 0},
    {"start": {"0": "x"}},
    {"start": {0: None}},
    {"start": {0: ""}},
    {"start": {40_000: "x"}},
    {"ordered": "no"},
    {"follow": None},
    {"follow": 1},
    {"partitions": "0"},
    {"partitions": 0},
    {"partitions": ["0"]},
    {"partitions": [-1]},
    {"partitions": [True]},
    {"partitions": []},
    {"decoder": "json"},
    {"v1_partitions": 0},
    {"v1_partitions": 40_000},
    {"v1_partitions": "4"},
    {"lineage": {1: "0"}},
    {"share": True},
    {"share": Share},
    {"fetch": {"stream": True}},
    {"retry": 5},
    {"limits": {"poll_interval": 1}},
    {"on_error": "stop"},
    {"http": "http"},
    {"http": httpx.Client},
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: next(iter(arguments)))
def test_every_argument_of_a_consumer_is_checked_where_it_is_given(
    arguments: dict[str, Any],
) -> None:
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=name):
        FeedConsumer(URL, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"limits": 3}, {"retry": "always"}, {"fetch": ()}, {"decoder": 1}, {"http": object()}],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.parametrize("client", [FeedClient, SyncFeedClient])
def test_every_argument_of_a_client_is_checked_where_it_is_given(
    client: Any, arguments: dict[str, Any]
) -> None:
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=name):
        client(URL, **arguments)


OPTIONS: list[tuple[type, dict[str, Any]]] = [
    (Limits, {"poll_interval": "1"}),
    (Limits, {"poll_interval": True}),
    (Limits, {"poll_interval": 0}),
    (Limits, {"poll_interval": float("nan")}),
    (Limits, {"max_batch_events": 0}),
    (Limits, {"max_buffered_bytes": 1.5}),
    (Limits, {"max_buffered_bytes": None}),
    (RetryPolicy, {"base_delay": "1"}),
    (RetryPolicy, {"decide": "retry"}),
    (RetryPolicy, {"give_up_after": -1}),
    (Share, {"lease_seconds": "30"}),
    (Share, {"instance": 3}),
    (FetchOptions, {"page_size_hint": "100"}),
    (FetchOptions, {"page_size_hint": 0}),
    (FetchOptions, {"stream": "yes"}),
    (FetchOptions, {"filters": "kind=a"}),
    (FetchOptions, {"filters": {"kind": 1}}),
    (FetchOptions, {"event_types": "a"}),
    (FetchOptions, {"event_types": 1}),
    (FetchOptions, {"event_types": [1]}),
    (Retry, {"attempts": 0}),
    (Retry, {"attempts": "5"}),
    (Retry, {"errors": ValueError}),
    (Retry, {"errors": ()}),
    (Retry, {"then": "quarantine"}),
    (Quarantine, {"limit": 0}),
    (Quarantine, {"limit": 2.5}),
    (Quarantine, {"to": "quarantine.db"}),
    (Quarantine, {"errors": (BaseException,)}),
]


@pytest.mark.parametrize(("options", "arguments"), OPTIONS)
def test_every_option_is_checked_where_it_is_given(
    options: type, arguments: dict[str, Any]
) -> None:
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=name):
        options(**arguments)


async def test_a_decision_that_is_none_is_an_error_that_says_so() -> None:
    feed = LocalFeed()
    feed.fail(503, on="discovery")
    retry = RetryPolicy(decide=lambda error: True)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"RetryPolicy\.decide returns must be"):
        await feed.enter(retry=retry)


def test_r08_edges_can_be_given_as_text() -> None:
    assert parse_lineage("1:0") == {1: 0}
    assert parse_lineage(" 1:0, 2 : 0 ,1:0") == {1: 0, 2: 0}
    assert parse_lineage("3:none,4:None") == {3: None, 4: None}


def test_r08_any_other_text_is_refused() -> None:
    wrong = {
        "must be pairs": ["", "1", "1:", ":0", "1:0,", "a:0", "1:-1", "1:²", "none:1"],
        "two parents": ["1:0,1:2", "1:0,1:none"],
        "ids from 0 to 32767": ["1:32768"],
    }
    for message, texts in wrong.items():
        for text in texts:
            with pytest.raises(ValueError, match=message):
                parse_lineage(text)
