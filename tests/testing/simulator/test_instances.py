"""Several simulated instances share a feed: nothing is violated, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client.lineage.planner import Planner
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.sharing.coordinator import Coordinator
from feedapi_client.stores.memory_leases import MemoryLeases
from feedapi_client.testing.simulator.__main__ import main
from feedapi_client.testing.simulator.scenario import generate
from feedapi_client.testing.simulator.shared import shared
from feedapi_client.testing.simulator.simulation import run
from feedapi_client.testing.simulator.store import Database
from tests.testing.simulator.backends import BACKENDS

SEEDS = 25


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


def saves_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "check", lambda *_: None)
    patch.setattr(RuntimePartition, "is_lost", lambda *_: False)


def an_outdated_position_is_kept_after_a_claim(patch: pytest.MonkeyPatch) -> None:
    real = Planner.refresh

    def refresh(planner: Planner, positions: Any, **options: Any) -> Any:
        known = {p: e.position for p, e in planner.entries.items() if e.position is not None}
        return real(planner, {**positions, **known}, **options)

    patch.setattr(Planner, "refresh", refresh)


def the_dead_keep_their_leases(patch: pytest.MonkeyPatch) -> None:
    real = MemoryLeases.claim

    async def claim(leases: MemoryLeases, feed: Any, instance: str, epochs: Any) -> Any:
        rows = leases._shared[feed].leases
        free = {p: e for p, e in epochs.items() if p not in rows or rows[p].owner is None}
        return await real(leases, feed, instance, free)

    patch.setattr(MemoryLeases, "claim", claim)


def a_hand_over_does_not_release(patch: pytest.MonkeyPatch) -> None:
    async def release(*_: Any) -> None:
        pass

    patch.setattr(Coordinator, "_release_settled", release)


@pytest.mark.parametrize(
    ("plant", "rules"),
    [
        (saves_are_not_fenced, {"exactly-once"}),
        (an_outdated_position_is_kept_after_a_claim, {"progress", "exactly-once", "busy"}),
        (the_dead_keep_their_leases, {"progress"}),
        (a_hand_over_does_not_release, {"progress", "end"}),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = (run(shared(generate(seed), 3)).failure for seed in range(100))
    first = next(failure for failure in found if failure is not None)
    assert first in rules
