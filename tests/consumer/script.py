"""Tests as rows of a table: what a publisher, a consumer and an application do, step by step.

A step is written as the call of a method: ``do.split(0, 1)``. It is one of `Play`, or otherwise of
its `LocalFeed`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from inspect import isawaitable
from typing import Any

import anyio
import pytest

from feedapi_client import Batch, CommitOrderError
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    LocalFeed,
    Reader,
    Transaction,
    n_of,
    rediscovered,
    wait_until,
)

Step = Callable[["Play"], Awaitable[None]]


class Steps:
    """Makes steps of method calls."""

    def __getattr__(self, name: str) -> Callable[..., Step]:
        def make(*args: Any, **options: Any) -> Step:
            async def step(play: Play) -> None:
                method = getattr(play, name, None) or getattr(play.feed, name)
                if isawaitable(result := method(*args, **options)):
                    await result

            return step

        return make


do = Steps()


class Play:
    """Carries out steps. `open` begins a consumer, which stays open until the end or `leave`."""

    def __init__(self, feed: LocalFeed) -> None:
        self.feed = feed
        self.batches: dict[str, Batch] = {}
        self.readers: dict[str, Reader] = {}
        self.cursors: dict[int, str] = {}
        self._block = AsyncExitStack()
        self._reader: Reader | None = None

    @property
    def reader(self) -> Reader:
        assert self._reader is not None
        return self._reader

    def begin_with(self, *args: Any, **settings: Any) -> None:
        """Take another feed than that of one partition."""
        self.feed = LocalFeed(*args, **settings)

    def set(self, **attributes: Any) -> None:
        """Change attributes of the publisher."""
        for name, value in attributes.items():
            setattr(self.feed, name, value)

    async def open(self, **options: Any) -> None:
        self._reader = await self._block.enter_async_context(self.feed.open(**options))

    async def leave(self) -> None:
        await self._block.aclose()

    def consumer_is_made(self) -> None:
        self._reader = Reader(self.feed.consume())

    async def enters_again(self) -> None:
        await self._block.enter_async_context(self.reader.consumer)

    def again(self) -> None:
        """Begin another iteration of the consumer."""
        self._reader = Reader(self.reader.consumer)

    def keep(self, name: str) -> None:
        """Remember the iteration."""
        self.readers[name] = self.reader

    async def is_over(self, name: str) -> None:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises((StopAsyncIteration, CommitOrderError)):
            await anext(self.readers[name].events)

    async def runs(self) -> None:
        async def handle(_: Batch) -> None: ...

        await self.reader.consumer.run(handle)

    async def raises(self, error: type[Exception], text: str, step: Step, **fields: Any) -> None:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(error, match=text) as caught:
            await step(self)
        assert type(caught.value) is error
        for name, value in fields.items():
            assert getattr(caught.value, name) == value

    # ------------------------------------------------------------------ what is read

    async def reads(self, *numbers: int, **options: Any) -> None:
        """A consumer that begins now reads these, in this order, and is at the end of the feed."""
        assert await self.feed.read(**options) == [*numbers]

    async def reads_all(self, *numbers: int, **options: Any) -> None:
        """As `reads`, of several partitions: in any order."""
        assert sorted(await self.feed.read(**options)) == [*numbers]

    async def takes(self, *numbers: int) -> None:
        """The open consumer gives these events next, in this order."""
        assert await self.reader.take(len(numbers)) == [*numbers]

    async def takes_all(self, *numbers: int) -> None:
        assert sorted(await self.reader.take(len(numbers))) == [*numbers]

    async def ends(self, *numbers: int) -> None:
        """The open consumer gives these events, in any order, and ends."""
        with anyio.fail_after(SAFETY_LIMIT):
            assert sorted(n_of([event async for event in self.reader.events])) == [*numbers]

    async def ends_in_order(self) -> None:
        """The open consumer gives everything that is published, each entity in order, and ends."""
        with anyio.fail_after(SAFETY_LIMIT):
            self.feed.check([event async for event in self.reader.events])

    async def reads_from_end_of(self, partition: int, *numbers: int) -> None:
        """As `reads_all`, of a consumer that starts at the end of that partition."""
        start = {partition: self.feed.end_cursor(partition)}
        await self.reads_all(*numbers, start=start)

    # ------------------------------------------------------------------ batches

    async def delivers(self, name: str, *numbers: int, partition: int | None = None) -> None:
        """The open consumer delivers a batch of these events next."""
        batch = self.batches[name] = await self.reader.batch(partition)
        assert n_of(batch.events) == [*numbers]

    async def delivers_some(self, name: str, *, last: int | None = None) -> None:
        """The open consumer delivers a batch of some events next, the last of which is `last`."""
        batch = self.batches[name] = await self.reader.batch()
        assert last in (None, n_of(batch.events)[-1])

    async def commits(self, name: str) -> None:
        await self.batches[name].commit()

    def check_cursor(self, name: str) -> None:
        """The batch goes up to the end of its partition."""
        assert self.batches[name].cursor == self.feed.end_cursor(self.batches[name].partition)

    async def rolls_back(self, name: str) -> None:
        """Commit in a transaction that is rolled back."""
        await self.batches[name].commit(Transaction())

    async def at_end(self) -> None:
        await self.reader.at_end()

    async def nothing_until(self, condition: Callable[[Play], object]) -> None:
        await self.reader.nothing_until(lambda: condition(self))

    # ------------------------------------------------------------------ what is shown

    async def state(self, partition: int, state: str) -> None:
        """Wait until the status shows it."""
        await self.reader.until(state, partition)

    async def knows(self, partition: int) -> None:
        await wait_until(lambda: partition in self.reader.consumer.status().partitions)

    async def wait_for(self, condition: Callable[[Play], object]) -> None:
        await wait_until(lambda: condition(self))

    async def rediscovered(self, times: int = 2) -> None:
        await rediscovered(self.feed, times)

    def waits(self, partition: int, *ancestors: int) -> None:
        assert self.reader.consumer.status()[partition].waits_for == ancestors
        assert not self.feed.asked(partition)

    async def reported(self, *words: str) -> None:
        """Wait for the report that holds these words. There is one."""
        await wait_until(lambda: self.reader.reports(*words))
        assert len(self.reader.reports(*words)) == 1

    def reports(self, count: int) -> None:
        assert len(self.reader.reports()) == count

    def errors(self, errors: dict[int, str | None]) -> None:
        """What the status shows of these partitions."""
        status = self.reader.consumer.status()
        assert {partition: status[partition].error for partition in errors} == errors

    async def stored(self, statuses: dict[int, str]) -> None:
        assert await self.feed.store.statuses() == statuses

    async def keep_cursors(self) -> None:
        self.cursors = await self.feed.store.cursors()

    async def still_at_cursor(self, partition: int) -> None:
        """The partition is stored at the cursor that `keep_cursors` found."""
        assert (await self.feed.store.cursors())[partition] == self.cursors[partition] != "_first"

    async def unread(self) -> None:
        """Nothing of partition 0 is committed."""
        assert await self.feed.store.cursors() == {0: "_first"}

    async def no_cursor_is(self, cursor: str) -> None:
        assert cursor not in (await self.feed.store.cursors()).values()

    async def at_one_cursor(self, *partitions: int) -> None:
        """These are stored, and no other, all at the same cursor."""
        cursors = await self.feed.store.cursors()
        assert {*cursors} == {*partitions}
        assert len({*cursors.values()}) == 1

    async def at_end_cursor(self, partition: int = 0) -> None:
        """The end of the partition is stored."""
        cursors = await self.feed.store.cursors()
        assert cursors[partition] == self.feed.end_cursor(partition)

    def saved(self, times: int) -> None:
        assert len(self.feed.store.saves) == times

    def unasked(self, *partitions: int) -> None:
        assert not any(self.feed.asked(partition) for partition in partitions)

    def asks_stream(self, stream: str | None) -> None:
        """All fetches so far had this argument `stream`."""
        assert {each.stream for each in self.feed.requests if each.kind == "fetch"} == {stream}

    def discoveries(self, least: int, most: int) -> None:
        assert least <= self.feed.counters["discovery"] <= most

    def fetches(self, least: int, most: int) -> None:
        assert least <= self.feed.counters["fetch"] <= most


async def play(*steps: Step, feed: LocalFeed | None = None, **settings: Any) -> None:
    """Carry out the steps with a `LocalFeed` of these settings."""
    stage = Play(feed or LocalFeed(**settings))
    async with stage._block:
        for step in steps:
            await step(stage)
