"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Callable

import anyio


async def eventually(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something that happens in another process or on another connection, where there is no event to wait for."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)
