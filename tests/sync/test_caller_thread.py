"""`in_callers_thread` where nobody has lent a thread: in a program with async."""

from __future__ import annotations

import threading

import anyio.to_thread
import pytest

from feedapi_client.stores import in_callers_thread

pytestmark = pytest.mark.anyio


async def test_without_a_lent_thread_the_function_is_called_at_once() -> None:
    assert await in_callers_thread(threading.get_ident) == threading.get_ident()


async def test_without_a_lent_thread_a_store_may_use_one_of_its_own() -> None:
    used = await in_callers_thread(threading.get_ident, otherwise=anyio.to_thread.run_sync)
    assert used != threading.get_ident()


async def test_what_the_function_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_callers_thread(lambda: 1 // 0)
