"""`Scheduler`: which job gets a slot, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
from feedapi_client.runtime.scheduler import Scheduler

from feedapi_client.errors import FeedUnavailableError
from feedapi_client.options import RetryPolicy
from feedapi_client.pace import Pace
from tests.runtime.helpers import safety_limit
from tests.simulation.clock import Backend, run_in_virtual_time

pytestmark = pytest.mark.anyio

Work = Callable[[str], Awaitable[None]]
LATER = 3600.0


async def run_until_idle(scheduler: Scheduler[str], work: Work) -> None:
    """Run the scheduler until each of its tasks waits for something."""
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run, work)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()


async def jobs_run(scheduler: Scheduler[str]) -> list[str]:
    ran: list[str] = []

    async def work(job: str) -> None:
        ran.append(job)

    await run_until_idle(scheduler, work)
    return ran


async def test_jobs_run_in_the_order_in_which_they_became_due() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    for job in "cab":
        scheduler.schedule(job)
    assert await jobs_run(scheduler) == ["c", "a", "b"]


async def test_a_job_that_is_scheduled_again_goes_behind_the_others() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    ran: list[str] = []

    async def work(job: str) -> None:
        ran.append(job)
        if ran.count(job) < 3:
            scheduler.schedule(job)

    for job in "abc":
        scheduler.schedule(job)
    await run_until_idle(scheduler, work)
    assert "".join(ran) == "abcabcabc"


async def test_no_more_jobs_run_at_once_than_there_are_slots() -> None:
    scheduler: Scheduler[str] = Scheduler(3)
    running: set[str] = set()

    async def work(job: str) -> None:
        running.add(job)
        await anyio.sleep_forever()

    for job in "abcde":
        scheduler.schedule(job)
    await run_until_idle(scheduler, work)
    assert running == {"a", "b", "c"}


async def test_a_slot_is_used_again_for_a_job_that_comes_later() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    ran: list[str] = []
    done = anyio.Event()

    async def work(job: str) -> None:
        ran.append(job)
        if job == "late":
            done.set()

    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run, work)
            scheduler.schedule("early")
            await anyio.wait_all_tasks_blocked()
            scheduler.schedule("late")
            await done.wait()
            tasks.cancel_scope.cancel()
    assert ran == ["early", "late"]


async def test_r14_a_job_that_pauses_holds_no_slot() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.schedule("pausing", LATER)
    scheduler.schedule("due")
    assert await jobs_run(scheduler) == ["due"]
    assert scheduler.is_scheduled("pausing")


async def test_a_pause_ends() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    ran: list[str] = []
    done = anyio.Event()

    async def work(job: str) -> None:
        ran.append(job)
        if len(ran) == 2:
            done.set()

    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run, work)
            await anyio.wait_all_tasks_blocked()
            scheduler.schedule("much later", LATER)
            scheduler.schedule("second", 0.02)
            scheduler.schedule("first", 0.01)
            await done.wait()
            tasks.cancel_scope.cancel()
    assert ran == ["first", "second"]


@pytest.mark.parametrize("delay", [0.0, LATER])
async def test_a_forgotten_job_does_not_run(delay: float) -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.schedule("forgotten", delay)
    scheduler.forget("forgotten")
    scheduler.schedule("other")
    assert not scheduler.is_scheduled("forgotten")
    assert await jobs_run(scheduler) == ["other"]


async def test_forgetting_an_unknown_job_does_nothing() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.forget("unknown")
    assert not scheduler.is_scheduled("unknown")


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (LATER, 0.0)])
async def test_a_job_that_is_scheduled_several_times_is_queued_once(
    before: float, after: float
) -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.schedule("job", before)
    scheduler.schedule("job", after)
    assert await jobs_run(scheduler) == ["job"]


async def test_scheduling_a_due_job_with_a_pause_moves_it() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.schedule("job")
    scheduler.schedule("job", LATER)
    assert await jobs_run(scheduler) == []
    assert scheduler.is_scheduled("job")


async def test_a_job_is_no_longer_scheduled_while_it_runs() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    seen: list[bool] = []

    async def work(job: str) -> None:
        seen.append(scheduler.is_scheduled(job))

    scheduler.schedule("job")
    await run_until_idle(scheduler, work)
    assert seen == [False]


async def test_r14_jobs_wait_when_they_are_due_and_every_slot_is_taken() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    seen: list[int] = []

    async def work(job: str) -> None:
        seen.append(scheduler.waiting.any)

    scheduler.schedule("first")
    assert not scheduler.waiting.any, "no slot is taken"
    scheduler.schedule("second")
    await run_until_idle(scheduler, work)
    assert seen == [1, 0]


async def test_r14_failing_jobs_leave_slots_to_the_others() -> None:
    """They use at most a quarter of the slots, one after the other."""
    scheduler: Scheduler[str] = Scheduler(8, failing=lambda job: job.startswith("failing"))
    running: set[str] = set()
    seen: list[int] = []
    release = anyio.Event()

    async def work(job: str) -> None:
        running.add(job)
        seen.append(sum(other.startswith("failing") for other in running))
        await release.wait()
        running.remove(job)

    for number in range(9):
        scheduler.schedule(f"failing {number}")
    scheduler.schedule("healthy 1")
    scheduler.schedule("healthy 2")
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run, work)
            await anyio.wait_all_tasks_blocked()
            assert running == {"healthy 1", "healthy 2", "failing 0", "failing 1"}
            assert scheduler.waiting == (0, 7)
            release.set()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert len(seen) == 11
    assert max(seen) == 2


class CountedJob:
    """Counts how often any job is looked up or compared."""

    uses = 0

    def __hash__(self) -> int:
        CountedJob.uses += 1
        return id(self)

    def __eq__(self, other: object) -> bool:
        CountedJob.uses += 1
        return self is other


async def test_waiting_looks_at_no_job() -> None:
    """It is asked for all the time, with up to 32,768 partitions due."""
    scheduler: Scheduler[CountedJob] = Scheduler(1)
    for _ in range(1000):
        scheduler.schedule(CountedJob())
    CountedJob.uses = 0
    for _ in range(1000):
        _ = scheduler.waiting
    assert CountedJob.uses == 0


async def test_an_exception_of_the_work_ends_the_run() -> None:
    scheduler: Scheduler[str] = Scheduler(2)

    async def work(job: str) -> None:
        raise ZeroDivisionError(job)

    scheduler.schedule("job")
    with safety_limit(), pytest.raises(BaseExceptionGroup) as caught:
        await scheduler.run(work)
    assert caught.value.subgroup(ZeroDivisionError) is not None


async def test_what_is_scheduled_after_the_run_has_ended_stays_queued() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    await jobs_run(scheduler)
    scheduler.schedule("job")
    assert scheduler.is_scheduled("job")


async def test_its_repr_counts_slots_and_jobs() -> None:
    scheduler: Scheduler[str] = Scheduler(4)
    scheduler.schedule("due")
    scheduler.schedule("later", LATER)
    assert repr(scheduler) == "<Scheduler 0 of 4 slots, 1 due, 1 later>"


async def test_r14_a_failing_job_gets_its_turn_although_healthy_ones_are_always_due() -> None:
    scheduler: Scheduler[str] = Scheduler(2, failing=lambda job: job == "failing")
    ran = anyio.Event()

    async def work(job: str) -> None:
        await anyio.lowlevel.checkpoint()
        if job == "failing":
            ran.set()
        else:
            scheduler.schedule(job)

    for job in ("a", "b", "c", "failing"):
        scheduler.schedule(job)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scheduler.run, work)
        with anyio.fail_after(30):
            await ran.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_r14_a_due_job_takes_the_last_place_ahead_of_a_second_other_request(
    slots: int, backend: Backend
) -> None:
    order: list[str] = []

    async def main() -> None:
        pace = limited_pace(slots)
        scheduler: Scheduler[str] = Scheduler(slots, pace=pace)

        async def work(job: str) -> None:
            order.append(job)
            if job != "last":
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scheduler.run, work)
            for number in range(pace.window - 1):
                scheduler.schedule(f"hangs {number}")
                await anyio.sleep(LATER)
            await scheduler.turn()
            scheduler.schedule("last")
            await scheduler.turn()
            order.append("turn")
            tasks.cancel_scope.cancel()

    run_in_virtual_time(main, backend=backend, seed="turn")
    assert order[-2:] == ["last", "turn"]


def limited_pace(slots: int) -> Pace:
    """Return the pace of a publisher that lets few requests pass, and as few at once."""
    pace, now = Pace(RetryPolicy(), slots), anyio.current_time()
    error = FeedUnavailableError("too many requests", status=429)
    pace.refused(error, began=now, now=now, under_way=0, answering=0)
    pace.passed(now, began=now)
    return pace
