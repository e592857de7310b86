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
from tests.consumer.test_watchdog import BACKENDS, LIMITS, STALL, HangingStore, Setting, nothing
from tests.testing.virtual_time import run_in_virtual_time


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if getattr(r, "problem", None) == "not-open"]
    assert all(
        (r.levelno, vars(r)["feed"]) == (logging.WARNING, "http://feed/feed") for r in records
    )
    return [record.getMessage() for record in records]


async def enter_for(setting: Setting, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        async with setting.http, setting.consumer:
            pass


def is_end(request: httpx.Request) -> bool:
    return bool(request.url.params.get("cursor") == "_last")


@BACKENDS
@pytest.mark.parametrize(
    ("hangs", "start", "text"),
    [
        (lambda _: True, "first", "for an answer to the discovery"),
        (is_end, "last", "for the present ends of 3 partitions"),
    ],
)
def test_an_entry_whose_publisher_hangs_is_a_warning(
    hangs: Callable[[httpx.Request], bool],
    start: str,
    text: str,
    backend: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        setting = Setting(3, start=start)
        setting.transport.hangs = hangs
        await enter_for(setting, STALL - 1)
        assert waits(caplog) == []
        setting = Setting(3, start=start)
        setting.transport.hangs = hangs
        await enter_for(setting, 1.5 * STALL)

    run_in_virtual_time(test, backend)
    (message,) = waits(caplog)
    assert f"the consumer is being entered and has waited {STALL:g} s {text}" in message
    assert "in _discover_with_ends" in message, "the stack of its task"


@BACKENDS
def test_an_entry_whose_store_hangs_is_a_warning_again_and_again(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        await enter_for(Setting(store=HangingStore("load")), 3.5 * STALL)

    run_in_virtual_time(test, backend)
    messages = waits(caplog)
    assert len(messages) == 3
    for number, message in enumerate(messages, 1):
        assert f"has waited {number * STALL:g} s for the store, loading cursors" in message
        assert "hang_in_store" in message


@BACKENDS
def test_a_first_save_that_hangs_is_a_warning(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(MemoryCursorStore):
        async def save(self, *args: Any, **options: Any) -> None:
            await anyio.sleep_forever()

    async def test() -> None:
        limits = replace(LIMITS, commit_timeout=1.5 * STALL)
        setting = Setting(store=Hanging(), limits=limits)
        async with setting.http:
            with pytest.raises(StoreError, match="commit_timeout"):
                await setting.consumer.__aenter__()

    run_in_virtual_time(test, backend)
    (message,) = waits(caplog)
    assert f"has waited {STALL:g} s for the store, saving cursors" in message
    assert "in save" in message


@BACKENDS
def test_an_entry_that_waits_for_another_instance_names_it(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        store = MemoryCursorStore()
        first = Setting(store=store, share=Share(instance="first"), start="last")
        first.transport.hangs = is_end
        second = Setting(store=store, share=Share(instance="second"), start="last")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter_for, first, 2 * STALL)
            await anyio.sleep(1)
            await enter_for(second, 1.5 * STALL)
            tasks.cancel_scope.cancel()

    run_in_virtual_time(test, backend)
    assert any("first-" in text and "saves the first positions" in text for text in waits(caplog))


@BACKENDS
def test_each_thing_that_an_entry_waits_for_has_its_time(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither takes too long."""

    class Slow(MemoryCursorStore):
        async def load(self, feed: Any) -> Any:
            await anyio.sleep(0.8 * STALL)
            return await super().load(feed)

        async def save(self, *args: Any, **options: Any) -> None:
            await anyio.sleep(0.8 * STALL)
            await super().save(*args, **options)

    async def test() -> None:
        setting = Setting(store=Slow())

        async def body() -> None:
            return

        await setting.run(nothing, body)

    run_in_virtual_time(test, backend)
    assert waits(caplog) == []


@BACKENDS
def test_an_error_of_the_entry_is_raised_as_it_is(backend: str) -> None:
    class Broken(MemoryCursorStore):
        async def load(self, feed: Any) -> Any:
            raise OSError("the file is gone")

    async def test() -> None:
        for share in (None, Share()):
            setting = Setting(store=Broken(), share=share)
            async with setting.http:
                with pytest.raises(StoreError) as caught:
                    await setting.consumer.__aenter__()
            assert isinstance(caught.value.__cause__, OSError)

    run_in_virtual_time(test, backend)


def test_ctrl_c_within_an_entry_is_raised_as_it_is() -> None:
    class Interrupted(MemoryCursorStore):
        async def load(self, feed: Any) -> Any:
            raise KeyboardInterrupt

    async def test() -> None:
        setting = Setting(store=Interrupted())
        async with setting.http:
            await setting.consumer.__aenter__()

    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(test, "trio")
