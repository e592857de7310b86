"""Worker threads of stores, and what cancels the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from feedapi_client.stores.threads import in_thread, transact_in_thread


class Transaction:
    """One whose work, or whose commit, goes on only when it may."""

    def __init__(self, waits_in: str) -> None:
        self.waits, self.go_on, self.over = threading.Event(), threading.Event(), threading.Event()
        self.committed = self.fails = False
        self._waits_in = waits_in

    @contextmanager
    def begin(self) -> Iterator[None]:
        try:
            yield
            self._reach("commit")
            self.committed = True
        finally:
            self.over.set()

    def work(self, _: None = None) -> None:
        self._reach("work")

    def whole(self) -> None:
        with self.begin():
            self.work()

    def _reach(self, where: str) -> None:
        if where == self._waits_in:
            self.waits.set()
            self.go_on.wait(60)
            if self.fails:
                raise OSError("the connection is gone")


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("what", ["a thread", "a thread that raises", "a commit"])
def test_r20_what_has_begun_is_waited_for_after_a_native_cancellation(
    what: str, times: int
) -> None:
    one = Transaction("commit" if what == "a commit" else "work")
    one.fails = "raises" in what

    async def main() -> None:
        begun = transact_in_thread(one.begin, one.work)
        call = asyncio.ensure_future(begun if what == "a commit" else in_thread(one.whole))
        await asyncio.to_thread(one.waits.wait, 60)
        for _ in range(times):
            call.cancel()
            done, _ = await asyncio.wait([call], timeout=0.05)
            assert not done
        one.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert one.over.is_set()
        assert one.committed != one.fails
        begun.close()

    asyncio.run(main())


@pytest.mark.anyio
async def test_r20_a_scope_that_is_cancelled_waits_as_well() -> None:
    one = Transaction("work")
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await anyio.to_thread.run_sync(one.waits.wait, 60)
            scope.cancel()
            one.go_on.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            await in_thread(one.whole)
    assert scope.cancel_called
    assert one.over.is_set()


@pytest.mark.anyio
async def test_what_a_function_returns_or_raises_is_passed_on() -> None:
    assert await in_thread(lambda: 7) == 7

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await in_thread(fail)


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["work", "commit"])
async def test_a_deadline_waits_for_no_transaction_and_before_the_commit_it_is_rolled_back(
    where: str,
) -> None:
    one = Transaction(where)
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await anyio.to_thread.run_sync(one.waits.wait, 60)
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            await transact_in_thread(one.begin, one.work)
    assert scope.cancelled_caught
    assert not one.over.is_set()
    one.go_on.set()
    await anyio.to_thread.run_sync(one.over.wait, 60)
    assert one.committed == (where == "commit")
