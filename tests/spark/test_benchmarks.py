"""The benchmarks of the Spark source run, with sizes that say nothing. No time is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks.bench_spark import Measured, stream
from tests.benchmarks.bench_spark_idle import Epoch, Idle, draw, idle, table
from tests.benchmarks.spark_processes import PeakMemory
from tests.benchmarks.static_feed import static_feed

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_epochs_are_measured_without_the_first_ones(spark: Any) -> None:
    memory = PeakMemory()
    with static_feed(events=300, page_size=100, in_thread=True) as url:
        found = stream(spark, url, 100, skip=1, look=memory.look)
    assert found.events == 200
    assert len(found.batch_seconds) == 2
    assert memory.jvm > memory.worker > 0


@pytest.mark.timeout(600)
def test_idle_feed_and_small_epochs_are_measured_and_drawn(spark: Any, tmp_path: Path) -> None:
    found = idle(spark, 2, 0.1, 2)
    assert [epoch.requests > 0 for epoch in (found.first, *found.further)] == [True] * 3
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table([found]))
    assert shown.get().splitlines()[-2].split()[:2] == ["2", f"{found.requests:,.1f}"]
    draw([found, found], tmp_path / "charts" / "idle.svg")
    assert "<svg" in (tmp_path / "charts" / "idle.svg").read_text()


def test_net_leaves_out_a_micro_batch_of_sparks_own_for_each_epoch() -> None:
    run = Measured(events=1000, wall=9, processor=4, batch_seconds=[1, 1])
    own = Measured(events=100, wall=1, processor=1.5, batch_seconds=[])
    assert run.per_core == 250
    assert run.net_of(own) == 1000


def test_small_epoch_is_the_median_of_the_further_ones() -> None:
    epochs = [Epoch(1, 5, 0.3), Epoch(3, 4, 0.1), Epoch(2, 9, 0.2)]
    assert Idle(1, 0, 0, Epoch(9, 9, 9), epochs).epoch == Epoch(2, 5, 0.2)
