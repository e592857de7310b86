"""What is wrong with a stream or its broker is said within seconds."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    LiftbridgeApi,
    LiftbridgePublisher,
    NoStreamError,
    Relay,
    Stream,
    StreamError,
    StreamOptions,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import NatsServer
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def relay(
    feed: Publisher, broker: Broker, stream: Stream | str, api: LiftbridgeApi | None
) -> None:
    async with FeedConsumer(feed.url or "", follow=False) as consumer:
        await Relay(consumer, broker.publisher, stream, api=api).run()


async def test_a_stream_that_is_missing(
    broker: Broker, feed: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.at_least_once._LOOKED_FOR", 1.0)
    # Nobody subscribes to its subject, which NATS says long before the ack timeout.
    with anyio.fail_after(SAFETY_NET / 2):
        with pytest.raises(NoStreamError, match=r"Is the stream missing.*create_stream"):
            await relay(feed, broker, broker.name, None)
        with pytest.raises(StreamError, match="there is no such stream: create it"):
            await relay(feed, broker, broker.name, broker.api)


@pytest.mark.parametrize("told", [1, 8])
async def test_a_stream_with_another_number_of_partitions(
    broker: Broker, feed: Publisher, told: int
) -> None:
    await broker.create(partitions=4)
    with pytest.raises(StreamError, match=rf"has 4 partitions.* told {told} .*--partitions 4"):
        await relay(feed, broker, Stream(broker.name, partitions=told), broker.api)


@pytest.mark.parametrize("credentials", ["", "app:wrong@"])
async def test_a_password_that_is_refused(credentials: str) -> None:
    with NatsServer("--user", "app", "--pass", "right") as nats:
        url = nats.url.replace("//", f"//{credentials}")
        with anyio.fail_after(SAFETY_NET), pytest.raises(BrokerUnavailableError) as caught:
            async with LiftbridgePublisher(url, connect_timeout=2 * SAFETY_NET):
                pass
    assert "refuses the user, the password or the token" in str(caught.value)
    assert "wrong" not in str(caught.value)


async def test_nats_that_does_not_run_says_so() -> None:
    with NatsServer() as nats:
        url = nats.url
    with pytest.raises(BrokerUnavailableError, match="connection was refused"):
        async with LiftbridgePublisher(url, connect_timeout=1):
            pass


@pytest.mark.parametrize(
    "name", ["wild.*", "deep.>", "a b", "a/b", ".a", "a.", "a..b", "", "\n", "x" * 256]
)
def test_names_that_bring_a_broker_down_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="stream"):
        Stream(name)


@pytest.mark.parametrize(
    ("subject", "partitions"),
    [
        ("x.>", 2),
        (">", 2),
        *((each, 1) for each in ("x.>.y", "a b", "a..b", ".a", "a\n", "x" * 2049)),
    ],
)
def test_subjects_that_bring_a_broker_down_are_refused(subject: str, partitions: int) -> None:
    with pytest.raises(ValueError, match="can't be the subject"):
        Stream("s", subject, partitions)


@pytest.mark.parametrize(
    "option",
    [
        {"group": "a b"},
        {"group": "\t"},
        {"cleaner_seconds": -1},
        {"cleaner_seconds": math.nan},
        {"segment_bytes": -1},
        {"retention_seconds": math.inf},
    ],
    ids=str,
)
def test_options_that_bring_a_broker_down_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"group of a stream|not negative"):
        StreamOptions(**option)


@pytest.mark.parametrize(("subject", "partitions"), [("x.>", 1), ("x.*", 2), ("ä/", 2)])
async def test_a_stream_on_several_subjects_is_created(
    broker: Broker, subject: str, partitions: int
) -> None:
    stream = Stream(broker.name, f"{broker.name}.{subject}", partitions)
    await broker.api.create_stream(stream)
    assert (await broker.api.metadata(broker.name)).stream == stream


async def test_a_stream_with_the_longest_name_and_subject_is_stored(broker: Broker) -> None:
    longest = Stream("x" * 255, "s" * 2048, partitions=2)
    await broker.api.create_stream(longest)
    acks = await broker.publisher.publish_many(longest, [b"a", b"b"], partition=1)
    assert [ack.offset for ack in acks if ack] == [0, 1]
