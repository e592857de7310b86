"""A database fails over to a replica that lacks the last saves."""

from __future__ import annotations

import pytest

from tests.simulation.scenario import Scenario, Settings, Step
from tests.simulation.simulation import run


def parent_goes_back(seed: int, instances: int, lost: int, after: float) -> Scenario:
    """The save that a parent was drained is lost while its children begin."""
    steps = (
        Step(0.0, "publish", {"count": 4, "entities": 1}),
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 4, "entities": 1}),
        Step(after, "fail_over", {"lost": lost}),
        Step(0.5, "publish", {"count": 8, "entities": 1}),
    )
    settings = Settings(instances=instances, handling=0.05, store_latency=0.01)
    return Scenario(f"parent goes back {seed}", settings, steps)


@pytest.mark.parametrize("instances", [0, 2])
def test_r08_children_of_a_parent_that_goes_back_wait_for_it(instances: int) -> None:
    failures = {
        run(parent_goes_back(seed, instances, lost, after)).failure
        for lost in (1, 2, 5)
        for after in (0.4, 0.45, 0.5, 0.54, 0.58, 0.62, 0.7)
        for seed in range(3)
    }
    assert failures == {None}
