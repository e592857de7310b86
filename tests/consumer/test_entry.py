"""An entry that hangs says in the log what it waits for. On virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import MemoryCursorStore, Share, StoreError
from tests.consumer.test_watchdog import LIMITS, STALL, Setting
from tests.testing.virtual_time import run_in_virtual_time

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if getattr(r, "problem", None) == "not-open"]
    for record in records:
        assert (record.levelno, vars(record)["feed"]) == (logging.WARNING, "http://feed/feed")
    return [record.getMessage() for record in records]


class Store(MemoryCursorStore):
    """Does something before each load and each save."""

    def __init__(self, *, load: Any = None, save: Any = None) -> None:
        super().__init__()
        self._before = {"load": load, "save": save}

    async def _do(self, operation: str) -> None:
        if self._before[operation] is not None:
            await self._before[operation]()

    async def load(self, feed: Any) -> Any:
        await self._do("load")
        return await super().load(feed)

    async def save(self, *args: Any, **options: Any) -> None:
        await self._do("save")
        await super().save(*args, **options)


async def enter_for(setting: Setting, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        async with setting.http, setting.consumer:
            pass


def is_end(request: httpx.Request) -> bool:
    return bool(request.url.params.get("cursor") == "_last")


@pytest.mark.parametrize(
    ("hangs", "start", "text"),
    [
        (lambda _: True, "first", "for an answer to the discovery"),
        (is_end, "last", "for the present ends of 3 partitions"),
    ],
)
async def test_an_entry_whose_publisher_hangs_is_a_warning(
    hangs: Callable[[httpx.Request], bool],
    start: str,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for seconds in (STALL - 1, 1.5 * STALL):
        assert waits(caplog) == []
        setting = Setting(3, start=start)
        setting.transport.hangs = hangs
        await enter_for(setting, seconds)
    (message,) = waits(caplog)
    assert f"the consumer is being entered and has waited {STALL:g} s {text}" in message
    assert "in _discover_with_ends" in message, "the stack of its task"


async def test_an_entry_whose_store_hangs_is_a_warning_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await enter_for(Setting(store="load"), 3.5 * STALL)
    messages = waits(caplog)
    assert len(messages) == 3
    for number, message in enumerate(messages, 1):
        assert f"has waited {number * STALL:g} s for the store, loading cursors" in message
        assert "hang_on_purpose" in message


async def test_a_first_save_that_hangs_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    limits = replace(LIMITS, commit_timeout=1.5 * STALL)
    setting = Setting(own_store=Store(save=anyio.sleep_forever), limits=limits)
    async with setting.http:
        with pytest.raises(StoreError, match="commit_timeout"):
            await setting.consumer.__aenter__()
    (message,) = waits(caplog)
    assert f"has waited {STALL:g} s for the store, saving cursors" in message
    assert "in save" in message


async def test_an_entry_that_waits_for_another_instance_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryCursorStore()
    first = Setting(own_store=store, share=Share(instance="first"), start="last")
    first.transport.hangs = is_end
    second = Setting(own_store=store, share=Share(instance="second"), start="last")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter_for, first, 2 * STALL)
        await anyio.sleep(1)
        await enter_for(second, 1.5 * STALL)
        tasks.cancel_scope.cancel()
    assert any("first-" in text and "saves the first positions" in text for text in waits(caplog))


async def test_each_thing_that_an_entry_waits_for_has_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither takes too long."""

    async def slow() -> None:
        await anyio.sleep(0.8 * STALL)

    await enter_for(Setting(own_store=Store(load=slow, save=slow)), 2 * STALL)
    assert waits(caplog) == []


@pytest.mark.parametrize("share", [None, Share()], ids=["alone", "shared"])
async def test_an_error_of_the_entry_is_raised_as_it_is(share: Share | None) -> None:
    async def fail() -> None:
        raise OSError("the file is gone")

    setting = Setting(own_store=Store(load=fail), share=share)
    async with setting.http:
        with pytest.raises(StoreError) as caught:
            await setting.consumer.__aenter__()
    assert isinstance(caught.value.__cause__, OSError)


def test_ctrl_c_within_an_entry_is_raised_as_it_is() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def test() -> None:
        setting = Setting(own_store=Store(load=interrupt))
        async with setting.http:
            await setting.consumer.__aenter__()

    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(test, "trio")
