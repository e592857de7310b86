"""All benchmarks run, with sizes that say nothing. No time is checked."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nginx
from tests.benchmarks import bench_keys, instructions
from tests.benchmarks.consume_loops import ASKED_EVERY, LOOPS, NEWER
from tests.benchmarks.processes import PROGRAM
from tests.benchmarks.results import Comparison
from tests.benchmarks.static_feed import static_feed
from tests.servers import Postgres

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_run_and_write_what_they_found(tmp_path: Path, postgres: Postgres) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--output", str(tmp_path)]
    command += ["--postgres", postgres.url("asyncpg")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert {"cpu", "cores", "system", "python"} == set(found["machine"])
    assert len(found["results"]) >= 30
    assert all(result["ours"] and result["theirs"] for result in found["results"])
    if nginx.program():
        assert any(result["name"].startswith("idle polls") for result in found["results"])
    for chart in ("ratios.svg", "polls.svg", "latency.svg"):
        assert "<svg" in (tmp_path / chart).read_text()


def test_ratio_is_of_the_medians_and_spread_of_the_rounds() -> None:
    found = Comparison(name="a / b", unit="s", ours=[1, 2, 9], theirs=[4, 4, 4], bar=0.5)
    assert (found.ratio, found.spread) == (0.5, (0.25, 2.25))
    assert found.met


@pytest.mark.parametrize(("bar", "less", "met"), [(0.5, True, True), (0.4, True, False)])
def test_less_may_be_better(bar: float, less: bool, met: bool) -> None:
    found = Comparison(name="a / b", unit="s", ours=[2], theirs=[4], bar=bar, less_is_better=less)
    assert found.met is met


def test_loops_import_only_what_version_0_1_0_has() -> None:
    """Or ``--against 27cbeea`` could not run them with it."""
    program = ast.parse(PROGRAM.read_text())
    imported = {node.module for node in program.body if isinstance(node, ast.ImportFrom)}
    ours = {module for module in imported if module and module.startswith("feedapi_client")}
    assert ours == {"feedapi_client", "feedapi_client.telemetry"}
    assert LOOPS.keys() > NEWER


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_every_loop_reads_the_whole_feed(loop: str) -> None:
    dialect = "v1" if loop.startswith("v1") else "v2-token"
    events = ASKED_EVERY + 2000
    with static_feed(dialect=dialect, events=events, page_size=3000, in_thread=True) as url:
        assert asyncio.run(LOOPS[loop](url)) == events


def test_a_monitor_costs_what_it_does_for_events_and_what_it_does_in_a_second() -> None:
    found: dict[str, float] = dict.fromkeys(instructions.LOOPS, 1000.0)
    found["batches_raw_observed"] = 1020.0
    found["batches_raw_monitored"] = 1010.0
    found["batches_raw_status"] = 1010.0 + 2_000_000 / ASKED_EVERY
    found["batches_raw_scraped"] = 1010.0 + 15_000_000 / ASKED_EVERY
    found["run_raw"] = 500.0
    lines = instructions.report(found, rate=100_000)
    assert "batches_raw: 1000 instructions an event" in lines
    assert "batches_raw_observed: 1020 instructions an event, +2.0%" in lines
    assert "batches_raw_status: 1210 instructions an event, 2.0 M an answer" in lines
    assert "run_raw_observed: 1000 instructions an event, +100.0%" in lines
    # 10 for itself; a second has 1 M for the page and 1 M for Prometheus, and 100,000 events.
    assert lines[-1].endswith("1030 instructions an event, +3.0%")


def test_a_monitor_that_was_not_asked_has_no_figure() -> None:
    assert len(instructions.report({"batches_raw": 1.0, "batches_raw_monitored": 1.0}, 1)) == 2


@pytest.mark.slow
def test_keys_run_and_are_drawn(tmp_path: Path) -> None:
    with static_feed(events=200, in_thread=True) as url:
        assert len(bench_keys.queueing(url, 200)) == len(bench_keys.BOUNDS)
        found = bench_keys.zipf(url, 200, tmp_path / "by-key.svg")
    assert [row[0] for row in found] == list(bench_keys.EXPONENTS)
    assert "<svg" in (tmp_path / "by-key.svg").read_text()
    with static_feed(events=20_000, endless=True, in_thread=True) as url:
        rows = asyncio.run(bench_keys.hang(url, 2.0))
    assert rows[-1][0] == "after 2 s"
