"""A broker that loses messages which it acked, and gives their offsets again.

Brokers do when two leaders of a partition die within seconds.
"""

from __future__ import annotations

from contextlib import aclosing
from itertools import count
from typing import Any

import pytest

from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    RelayReader,
    StreamGapError,
)
from tests.liftbridge.broker import Broker
from tests.liftbridge.ledgers import (
    FORMATS,
    KEY,
    open_ledger,
    read_relayed,
    save,
    store_of,
)
from tests.positions import counted

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("impatient")]


@pytest.mark.parametrize("more", [1, 2, 6])
async def test_a_live_subscription_returns_what_is_stored_at_the_offsets_of_lost_messages(
    broker: Broker, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"0", b"1", b"2", b"lost", b"lost, too"])
    values: list[bytes] = []
    async with aclosing(broker.api.subscribe(broker.name)) as messages:
        async for message in messages:
            values.append(message.value)
            if len(values) == 5:
                await broker.lose(2)
                assert await broker.newest() == 2
                await broker.publisher.publish_many(broker.name, [b"new"] * more)
            if len(values) == 5 + more:
                break
    assert values == [b"0", b"1", b"2", b"lost", b"lost, too"] + [b"new"] * more
    [warning] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert warning.getMessage().startswith(f"stream {broker.name}: the broker lost messages")
    assert getattr(warning, "offset", None) == 3


async def test_a_subscription_that_read_too_many_lost_messages_says_so(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.subscription._REMEMBERED", 2)
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"x"] * 9)
    async with aclosing(broker.api.subscribe(broker.name)) as messages:
        for _ in range(9):
            await anext(messages)
        await broker.lose(9)
        await broker.api.partition_metadata(broker.name)
        await broker.publisher.publish_many(broker.name, [b"y"] * 9)
        with pytest.raises(
            StreamGapError, match=rf"{broker.name}: the broker lost messages that were"
        ):
            await anext(messages)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_says_that_its_messages_are_lost_and_the_next_one_writes_them_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.stream_store._LOST_AFTER", 1.0)
    store = await open_ledger(broker, format)
    for n in range(1, 4):
        await save(store, n, n)
    await broker.lose(2)
    with pytest.raises(StreamGapError, match=r"from offset 1 on, .*start the relay again"):
        await save(store, 4, 4)
    restarted = store_of(broker, format)
    assert await restarted.load(KEY) == {0: counted("c1", 1)}
    for n in range(2, 5):
        await save(restarted, n, n)
    assert await read_relayed(broker, 4) == [1, 2, 3, 4]


async def test_looks_that_fail_now_and_then_do_not_hide_a_loss(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.stream_store._LOST_AFTER", 1.0)
    store = await open_ledger(broker, give_up_after=5.0)
    await save(store, 1, 1)
    await save(store, 2, 2)
    await broker.lose(1)
    looks, look = count(1), broker.api.resume_partition

    async def now_and_then(*place: Any) -> Any:
        if next(looks) % 3 == 0:
            raise BrokerUnavailableError("away for a moment")
        return await look(*place)

    monkeypatch.setattr(broker.api, "resume_partition", now_and_then)
    with pytest.raises(StreamGapError, match="start the relay again"):
        await save(store, 3, 3)


@pytest.mark.parametrize("format", FORMATS)
async def test_an_idle_relay_says_so_too_instead_of_hiding_it_with_a_message_of_its_own(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format, give_up_after=2)
    await save(store, 1, 1)
    await save(store, 2, 2)
    await broker.lose(1)
    assert not await store.keep(idle_seconds=0)
    with pytest.raises(StreamGapError, match="start the relay again"):
        await save(store, 3, 3)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_reader_says_which_batches_come_again_and_continues_when_they_are_undone(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format)
    await save(store, 1, 1)
    await save(store, 2, 2, 3, 4)
    async with aclosing(RelayReader(broker.api, broker.name).batches()) as batches:
        read = [await anext(batches) for _ in range(2)]
        await broker.lose(1)
        restarted = store_of(broker, format)
        assert await restarted.load(KEY) == {0: counted("c1", 1)}
        await save(restarted, 2, 2, 3, 4, 5)
        with pytest.raises(StreamGapError, match=r"lost .* from offset \d on") as caught:
            await anext(batches)
    assert caught.value.offset == read[1].next_offset - 1
    [kept] = [batch for batch in read if batch.next_offset <= caught.value.offset]
    assert kept.cursor == "c1"
    assert await read_relayed(broker, 4, start=caught.value.offset) == [2, 3, 4, 5]
    assert await read_relayed(broker, 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_fills_a_stream_that_nobody_can_read_before_it_has_as_many_messages_again(
    broker: Broker, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    store = await open_ledger(broker, format)
    for n in range(1, 4):
        await save(store, n, n)
    await broker.lose(2, keep_high_watermark=True)
    found = await broker.api.partition_metadata(broker.name)
    assert (found.high_watermark, found.newest_offset) == (2, 0)
    # An operator who only looks is told so at once, and appends nothing.
    assert await store_of(broker, look_only=True).feeds() == []
    assert "from offset 0 to 0 can't be read before its relay starts" in caplog.text
    assert await broker.newest() == 0
    restarted = store_of(broker, format)
    assert await restarted.load(KEY) == {0: counted("c1", 1)}
    await save(restarted, 2, 2, 3)
    assert await read_relayed(broker, 3) == [1, 2, 3]
