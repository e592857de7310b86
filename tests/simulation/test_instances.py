"""Several simulated instances share a feed: nothing is violated, and planted bugs are found."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores import MemoryCursorStore
from tests.leases import claims
from tests.simulation.__main__ import main, numbers
from tests.simulation.backends import BACKENDS
from tests.simulation.clock import run_in_virtual_time, sleep, virtual_clock
from tests.simulation.incidents import set_clock
from tests.simulation.many import Histories
from tests.simulation.scenario import Scenario, Settings, Step, generate
from tests.simulation.shared import SharedSession, shared
from tests.simulation.simulation import run
from tests.simulation.store import SimulatedDatabase
from tests.simulation.trace import Trace

SEEDS = 10


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_r17_instances_apply_everything_once_and_do_not_fence_each_other(backend: Any) -> None:
    for seed in range(SEEDS):
        instances = 2 + seed % 3
        outcome = run(shared(generate(seed, backend), instances))
        assert outcome.failure is None, f"--instances {instances} --seed {seed}\n{outcome.text}"


def test_a_seed_with_instances_is_the_same_each_time() -> None:
    one, two = (run(shared(generate(7), 3)) for _ in range(2))
    assert one.digest == two.digest
    assert any("claimed" in line for line in one.trace)


def test_the_command_runs_seeds_with_instances(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--instances", "2"]) == 0
    assert "2 seeds, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "numbers_of_it"),
    [("", ()), ("0", ()), ("3", (3,)), ("2..4", (2, 3, 4)), ("2..2", (2,))],
)
def test_a_number_of_instances_or_a_range(text: str, numbers_of_it: tuple[int, ...]) -> None:
    assert numbers(text) == numbers_of_it


@pytest.mark.parametrize("text", ["-1", "4..2", "a", "2..", "..2", "0..2"])
def test_what_is_no_range_of_instances_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "1", "--instances", text])


def test_a_seed_draws_a_number_of_the_range() -> None:
    histories = Histories(instances=(2, 3, 4))
    drawn = {histories.of(seed).settings.instances for seed in range(40)}
    assert drawn == {2, 3, 4}
    assert histories.of(7) == histories.of(7)


def test_instances_get_everything_that_one_instance_has() -> None:
    scenarios = [Histories(instances=(2, 3, 4)).of(seed) for seed in range(600)]
    steps = {step.do for scenario in scenarios for step in scenario.steps}
    assert steps >= {
        "merge",
        "split_unnamed",
        "choose_descendants",
        "rest",
        "fail_over",
        "operate",
        "roll_back",
        "set_clock",
        "store_fails",
        "store_stalls",
        "lease_clock",
    }
    kept = [
        s.how.get("leases", True) for each in scenarios for s in each.steps if s.do == "fail_over"
    ]
    assert {True, False} <= set(kept)
    settings = [scenario.settings for scenario in scenarios]
    for name in ("chosen", "rollbacks", "mixed", "lock_seconds", "poison"):
        assert any(getattr(each, name) for each in settings), name
    assert any(not each.follow for each in settings)
    assert any(each.commit_every > 1 for each in settings)
    assert any(each.on_error == "park" for each in settings)
    assert any("quarantine" in each.on_failure for each in settings)


def test_leases_expire_by_a_clock_that_jumps() -> None:
    async def main() -> list[bool]:
        leases, key = MemoryCursorStore(), FeedKey("http://feed/")
        renewed = []
        await leases.beat(key, "a", 10.0)
        for seconds in (9.0, -50.0, 51.0):
            set_clock(leases, seconds)
            renewed.append(await leases.beat(key, "a", 10.0))
        return renewed

    assert run_in_virtual_time(main, backend="asyncio", seed="clock") == [True, True, False]


@pytest.mark.parametrize("leases", [True, False])
def test_a_failover_keeps_leases_that_are_in_another_database(leases: bool) -> None:
    steps = (
        Step(0.0, "publish", {"count": 4, "entities": 2}),
        Step(8.0, "fail_over", {"lost": 1, "leases": leases}),
        Step(0.0, "publish", {"count": 4, "entities": 2}),
    )
    outcome = run(shared(Scenario("failover of one", Settings(), steps), 2))
    assert outcome.failure is None, outcome.text


def test_a_claim_leaves_out_what_a_frozen_instance_is_about_to_claim() -> None:
    async def main() -> tuple[set[int], set[int]]:
        now = virtual_clock("asyncio")
        database = SimulatedDatabase(
            random=Random(0), latency=0.01, trace=Trace(now), on_effect=lambda _: None
        )
        frozen, other = SharedSession(database), SharedSession(database)
        key = FeedKey("http://feed/")
        for name, session in (("a", frozen), ("b", other)):
            await session.beat(key, name, 1000.0)
        claimed: list[set[int]] = []

        async def claim() -> None:
            claimed.append(await frozen.put(key, "a", claims("a", {0: 0})))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim)
            while not database.claims:
                await sleep(0.001)
            frozen.frozen_until = now() + 60.0
            meanwhile = await other.put(key, "b", claims("b", {0: 0, 1: 0}))
        return claimed[0], meanwhile

    late, meanwhile = run_in_virtual_time(main, backend="asyncio", seed="a")
    assert meanwhile == {1}
    assert late == {0}


def test_a_statement_waits_for_a_locked_row_so_long_at_most() -> None:
    async def main() -> float:
        now = virtual_clock("asyncio")
        database = SimulatedDatabase(
            random=Random(0), latency=0.01, trace=Trace(now), on_effect=lambda _: None
        )
        holder, waiter = SharedSession(database), SharedSession(database, 3.0)
        key = FeedKey("http://feed/")
        transaction = holder.transaction()
        await holder.save(key, {0: Position("f0-1")}, transaction=transaction)
        with pytest.raises(StoreError, match="lock timeout"):
            await waiter.save(key, {0: Position("f0-2")})
        transaction.close()
        await waiter.save(key, {0: Position("f0-2")})
        return now()

    assert 3.0 < run_in_virtual_time(main, backend="asyncio", seed="a") < 4.0
