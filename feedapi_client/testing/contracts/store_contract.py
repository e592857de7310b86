"""What a subclass of a contract declares and defines."""

# ruff: noqa: ARG002 - a subclass defines the hooks

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from feedapi_client.stores.base import CursorStore


def _with_reason(test: Any) -> Any:
    """Let any error of a test say what is expected, and why: its docstring."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        try:
            await test(*args, **kwargs)
        except Exception as error:
            error.add_note(f"expected: {inspect.getdoc(test)}")
            raise

    return run


@pytest.mark.anyio
class StoreContract:
    """The capabilities of a store, and the hooks that tests use to reach it."""

    def __init_subclass__(cls) -> None:
        for name, test in vars(cls).copy().items():
            if name.startswith("test_") and inspect.iscoroutinefunction(test) and test.__doc__:
                setattr(cls, name, _with_reason(test))

    supports_transactions: bool
    """The store takes part in a caller's transaction: define `begin`, `commit` and `rollback`."""
    supports_second_handle: bool
    """Another store object, as in another process, can work on the same storage.

    Define `second_handle`.
    """
    supports_failure_injection: bool
    """The storage can be made to fail: define `failing`."""

    @pytest.fixture
    def store(self) -> CursorStore:
        """Return a store without positions. May be an async fixture."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture store")

    def second_handle(self, store: Any) -> AbstractAsyncContextManager[CursorStore]:
        """Return another store object on the storage of `store`."""
        raise self._undefined("second_handle", "supports_second_handle")

    async def begin(self, store: Any) -> Any:
        """Begin a transaction as an application does, and return what `save` takes."""
        raise self._undefined("begin", "supports_transactions")

    async def commit(self, transaction: Any) -> None:
        """Commit what `begin` returned, and release it."""
        raise self._undefined("commit", "supports_transactions")

    async def rollback(self, transaction: Any) -> None:
        """Roll back what `begin` returned, and release it."""
        raise self._undefined("rollback", "supports_transactions")

    def failing(self, store: Any) -> AbstractAsyncContextManager[None]:
        """Return a context in which a save of the partitions 0 to 9 fails in the storage.

        If possible it fails after some of them were written.
        """
        raise self._undefined("failing", "supports_failure_injection")

    def _undefined(self, hook: str, capability: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} must define {hook}, or declare {capability} = False"
        )

    def _need(self, capability: str) -> None:
        """Skip the test when the store lacks a capability, fail it when that is not declared."""
        if not hasattr(self, capability):
            pytest.fail(f"{type(self).__name__} must declare {capability} = True or False")
        if not getattr(self, capability):
            pytest.skip(f"the store declares {capability} = False")
