"""Who gets a turn when, and who gives it back (R14). On virtual time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from feedapi_client import RetryPolicy
from feedapi_client.runtime.pace import Pace
from feedapi_client.runtime.scheduling import Agenda, Turn

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class Job:
    def __init__(self, name: str, *, failing: bool = False, seconds: float = 1.0) -> None:
        self.name, self.failing, self.seconds = name, failing, seconds

    def __repr__(self) -> str:
        return self.name


class Scene:
    """An agenda, and what its turns did."""

    def __init__(self, turns: int) -> None:
        self.agenda = Agenda(turns, 5.0, Pace(RetryPolicy(), turns))
        self.begun: list[tuple[str, float]] = []
        self.most = 0
        self._running = 0
        self.after: Callable[[Job, int], object] = lambda job, place: None

    async def work(self, job: Job, place: int) -> None:
        self.begun.append((job.name, anyio.current_time()))
        self._running += 1
        self.most = max(self.most, self._running)
        await anyio.sleep(job.seconds)
        self._running -= 1
        self.after(job, place)

    async def run(self, seconds: float) -> list[tuple[str, float]]:
        began = anyio.current_time()
        with suppress(TimeoutError), anyio.fail_after(seconds):
            await self.agenda.run(self.work)
        return [(name, round(at - began, 3)) for name, at in self.begun]


async def test_r14_turns_are_bounded_and_given_in_the_order_in_which_jobs_became_due() -> None:
    scene = Scene(2)
    for name in "abcd":
        scene.agenda.put(Job(name), 0.0)
    assert await scene.run(9) == [("a", 0), ("b", 0), ("c", 1), ("d", 1)]
    assert scene.most == 2


async def test_r14_a_job_that_pauses_holds_no_turn() -> None:
    scene, now = Scene(1), anyio.current_time()
    scene.agenda.put(Job("later"), now + 0.5)
    scene.agenda.put(Job("now", seconds=0.1), 0.0)
    assert await scene.run(9) == [("now", 0), ("later", 0.5)]


async def test_to_put_a_job_again_changes_nothing_unless_its_moment_is_another() -> None:
    scene, now = Scene(1), anyio.current_time()
    first, second, gone = Job("first"), Job("second"), Job("gone")
    for job in (first, second, gone):
        scene.agenda.put(job, 0.0)
    scene.agenda.put(first, 0.0)  # keeps its place
    scene.agenda.drop(gone)
    later = Job("later")
    scene.agenda.put(later, now + 9)
    scene.agenda.put(later, now + 5)
    assert (scene.agenda.is_due(first), scene.agenda.is_due(later)) == (True, False)
    assert scene.agenda.is_due(gone) is None
    assert await scene.run(20) == [("first", 0), ("second", 1), ("later", 5)]


@pytest.mark.parametrize("later", [0.0, 60.0])
async def test_jobs_that_are_dropped_again_and_again_leave_nothing_behind(later: float) -> None:
    """As those of an application that pauses and resumes with each batch."""
    scene, now = Scene(1), anyio.current_time()
    agenda, jobs = scene.agenda, [Job(name) for name in "ab"]
    for round in range(1000):
        for job in jobs:
            agenda.drop(job)
            agenda.put(job, now + later - round / 1000)
    assert len(agenda._later) + sum(map(len, agenda._due)) < 200
    assert [name for name, _ in await scene.run(later + 9)] == ["a", "b"]


async def test_r14_of_several_that_were_sent_away_the_one_that_waits_longest_is_first() -> None:
    scene, began = Scene(1), anyio.current_time()
    sent_away = [Job(name) for name in "abc"]
    for job in (*sent_away, Job("d")):
        scene.agenda.put(job, 0.0)

    def again(job: Job, place: int) -> None:
        if job in sent_away:
            sent_away.remove(job)
            scene.agenda.put(job, began + 3.5, place)

    scene.after = again
    assert [name for name, _ in await scene.run(9)] == [*"abcd", *"abc"]


async def test_r14_many_that_were_sent_away_come_back_at_once() -> None:
    """As by a gateway that sends all away for the same seconds. The event loop stands meanwhile."""
    looked_at, scene, began = 0, Scene(500), anyio.current_time()

    class Counted(Job):
        def __hash__(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return id(self)

    def again(job: Job, place: int) -> None:
        if len(scene.begun) == 500:
            scene.agenda.put(job, began + 9, place)

    scene.after = again
    jobs = [Counted(str(number)) for number in range(500)]
    for job in jobs:
        scene.agenda.put(job, 0.0)
    assert [name for name, _ in await scene.run(30)] == 2 * [job.name for job in jobs]
    assert looked_at < 50 * len(jobs)


async def test_r14_who_was_sent_away_keeps_its_place() -> None:
    """Its turn was refused because of the publisher's limits."""
    scene = Scene(1)
    first, others = Job("first"), [Job(name) for name in "abc"]

    def again(job: Job, place: int) -> None:
        if job is first and len(scene.begun) == 1:
            scene.agenda.put(first, anyio.current_time() + 0.5, place)

    scene.after = again
    for job in (first, *others):
        scene.agenda.put(job, 0.0)
    names = [name for name, _ in await scene.run(9)]
    assert names == ["first", "a", "first", "b", "c"]


async def test_r14_failing_jobs_share_a_quarter_of_the_turns_and_are_not_starved() -> None:
    scene = Scene(8)
    for number in range(6):
        scene.agenda.put(Job(f"f{number}", failing=True, seconds=4.0), 0.0)
    scene.agenda.put(Job("healthy"), 0.0)
    begun = await scene.run(30)
    assert ("healthy", 0.0) in begun
    assert [at for name, at in begun if name != "healthy"] == [0, 0, 4, 4, 8, 8]

    scene = Scene(1)

    def always_due(job: Job, _: int) -> None:
        if not job.failing:
            scene.agenda.put(job, 0.0)

    scene.after = always_due
    scene.agenda.put(Job("healthy"), 0.0)
    scene.agenda.put(Job("failing", failing=True), 0.0)
    assert "failing" in [name for name, _ in await scene.run(9)]


async def test_an_error_of_the_work_ends_the_run() -> None:
    agenda = Agenda(1, 5.0, Pace(RetryPolicy(), 1))

    async def fail(job: Job, place: int) -> None:
        raise LookupError

    agenda.put(Job("a"), 0.0)
    with pytest.raises(BaseExceptionGroup) as caught:
        await agenda.run(fail)
    assert caught.group_contains(LookupError)
    agenda.put(Job("b"), 0.0)  # stays for the next run


# ---------------------------------------------------------------------- who gives way


def held(agenda: Agenda, *, doublings: int = 0, failing: bool = False, **facts: bool) -> Turn:
    turn = Turn(lambda: 0.0, doublings=doublings, failing=failing)
    for name, value in facts.items():
        setattr(turn, name, value)
    agenda.hold(turn)
    return turn


def waiting(turns: int, due: int, failing: int = 0) -> Agenda:
    """An agenda whose turns are all taken, with so many due."""
    agenda = Agenda(turns, 5.0, Pace(RetryPolicy(), turns))
    agenda.running = turns
    for number in range(due + failing):
        agenda.put(Job(str(number), failing=number >= due), 0.0)
    return agenda


@pytest.mark.parametrize(
    ("due", "facts", "given_back"),
    [
        (0, {}, False),  # nobody waits
        (1, {}, True),
        (1, {"doublings": 1}, False),  # it was too slow before, and has twice the time
    ],
)
async def test_r14_a_turn_is_given_back_after_its_time_while_others_wait(
    due: int, facts: dict[str, int], given_back: bool
) -> None:
    agenda = waiting(1, due)
    turn = held(agenda, **facts)  # type: ignore[arg-type]
    for _ in range(5):
        agenda.look(1.0)
    assert turn.given_back is given_back


async def test_r14_as_many_as_wait_give_their_turn_back_the_oldest_first() -> None:
    agenda = waiting(3, 2)
    turns = [held(agenda) for _ in range(3)]
    agenda.look(5.0)
    assert [turn.given_back for turn in turns] == [True, True, False]


async def test_r14_the_failing_ones_make_room_for_each_other() -> None:
    agenda = waiting(8, 0, failing=3)
    healthy, failing = held(agenda), held(agenda, failing=True)
    agenda._failing = 2
    agenda.look(5.0)
    assert (healthy.given_back, failing.given_back) == (False, True)


@pytest.mark.parametrize(
    ("facts", "given_back"),
    [({}, True), ({"waits_for_room": True}, False), ({"brought": True}, False)],
)
async def test_r14_the_more_wait_the_shorter_all_may_be_silent(
    facts: dict[str, bool], given_back: bool
) -> None:
    """But not one that waits for the application, or that has brought something."""
    agenda = waiting(1, 100)
    turn = held(agenda, **facts)
    agenda.look(0.5)
    assert turn.given_back is given_back


async def test_r14_nobody_is_silent_while_others_are_answered() -> None:
    agenda = waiting(2, 100)
    silent, answered = held(agenda), held(agenda)
    agenda.look(0.2)
    agenda.brought(answered)
    agenda.look(0.2)
    assert not silent.given_back
