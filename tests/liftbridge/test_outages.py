"""Relays while a broker, or a part of it, is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import pytest

from feedapi_client import FeedConsumer, StoreError
from feedapi_client.liftbridge import AckTimeoutError, LiftbridgeApi, Relay
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.liftbridge.ledgers import MODES, look_often, store_for
from tests.liftbridge.middle import grpc_middle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_LIMITS = Limits(max_batch_bytes=500_000, commit_timeout=0.5, poll_interval=0.05)
_AWAY = 2.0
"""Seconds within which several attempts at a commit, a publish and a call fail."""


@asynccontextmanager
async def relay_of(
    feed: Publisher, broker: Broker, mode: str, give_up_after: float | None = None
) -> AsyncIterator[Relay]:
    """A relay that is soon impatient with its publishes and commits."""
    broker.publisher.ack_timeout = 0.5
    await broker.create(once=mode != MODES[0])
    async with FeedConsumer(
        feed.url or "",
        store=store_for(mode, broker),
        limits=_LIMITS,
        retry=RetryPolicy(give_up_after=give_up_after),
    ) as consumer:
        yield Relay(consumer, broker.publisher, broker.name, api=broker.api)
        consumer.stop()


async def has_relayed(relay: Relay, count: int) -> None:
    await eventually(lambda: relay.progress.events == count)


@pytest.mark.parametrize("mode", MODES)
async def test_a_relay_goes_on_over_nats_while_the_grpc_api_is_away(
    broker: Broker, feed: Publisher, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    async with AsyncExitStack() as api_is_there:
        middle = await api_is_there.enter_async_context(grpc_middle(broker.address))
        async with (
            LiftbridgeApi(middle.address, timeout=SAFETY_NET) as broker.api,
            relay_of(feed, broker, mode) as relay,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(relay.run)
            await has_relayed(relay, 20)
            await api_is_there.aclose()
            await anyio.sleep(_AWAY)  # the relay is idle, and looks at the stream often
            for more in (21, 22, 23):
                feed.append(0, {"n": more - 1})
                await has_relayed(relay, more)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_that_is_away_longer_than_a_commit_may_take_is_waited_for(
    broker: Broker, feed: Publisher, mode: str
) -> None:
    async with relay_of(feed, broker, mode) as relay, anyio.create_task_group() as tasks:
        tasks.start_soon(relay.run)
        await has_relayed(relay, 20)
        await broker.stop()
        feed.append(0, {"n": 20})
        await anyio.sleep(_AWAY)
        assert relay.progress.events == 20
        await broker.start()
        await has_relayed(relay, 21)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("mode", MODES)
async def test_a_broker_that_stays_away_is_an_error_after_the_patience_of_the_consumer(
    broker: Broker, feed: Publisher, mode: str
) -> None:
    async with relay_of(feed, broker, mode, give_up_after=2.0) as relay:

        async def stop() -> None:
            await has_relayed(relay, 20)
            await broker.stop()
            broker.api.timeout = 1.0
            feed.append(0, {"n": 20})

        stopping = asyncio.create_task(stop())
        with anyio.fail_after(SAFETY_NET), pytest.raises((StoreError, AckTimeoutError)):
            await relay.run()
        await stopping
    await broker.start()


@pytest.mark.parametrize(
    ("mode", "native"),
    [("at least once", False), ("at least once", True), ("batch", True), ("events", False)],
)
async def test_a_relay_that_waits_for_its_broker_can_be_cancelled(
    broker: Broker, feed: Publisher, mode: str, native: bool
) -> None:
    async with relay_of(feed, broker, mode) as relay, anyio.create_task_group() as tasks:
        running = asyncio.ensure_future(_cancellable(relay, tasks, native=native))
        await has_relayed(relay, 20)
        await broker.stop()
        feed.append(0, {"n": 20})
        await anyio.sleep(_AWAY / 2)
        with anyio.fail_after(SAFETY_NET / 2):
            if native:
                running.cancel()
            else:
                tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True), suppress(asyncio.CancelledError):
                await asyncio.wait({running}, timeout=SAFETY_NET / 2)
        assert running.done()
        assert relay.progress.events == 20
    await broker.start()


async def _cancellable(relay: Relay, tasks: anyio.abc.TaskGroup, *, native: bool) -> None:
    if native:
        await relay.run()
        return
    over = anyio.Event()

    async def run() -> None:
        try:
            await relay.run()
        finally:
            over.set()

    tasks.start_soon(run)
    await over.wait()
