"""Run the asynchronous part of a command."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function on asyncio and return its result.

    Raises what the function raises. Of an exception group, the first exception is raised, because
    a command reports one error.
    """
    import anyio

    try:
        return anyio.run(function, *args)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
