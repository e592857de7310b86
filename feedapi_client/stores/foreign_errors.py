"""What a store of the caller's own raises, as `StoreError`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from feedapi_client.causes import failure_of, store_problem
from feedapi_client.errors import FeedError, StoreError

T = TypeVar("T")


async def translated(call: Awaitable[T], doing: str, feed: str) -> T:
    """Return what `call` returns. Raises `StoreError` for an error that is not the library's.

    A store of one's own may let the errors of its driver through.

    Arguments:
        call: the operation of the store.
        doing: what it does, for the message.
        feed: the feed's URL, for the message.
    """
    try:
        return await call
    except FeedError:
        raise
    except BaseException as failed:  # noqa: BLE001 - a stray cancellation is one, too
        error = failure_of(failed, doing)
        problem = store_problem(error)
        why = type(error).__name__ + ("" if problem is None else f": {problem}")
        raise StoreError(f"{doing} failed: {why}", feed=feed) from error
