"""All benchmarks run, with sizes that say nothing. No time is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.results import Comparison
from tests.servers import Postgres

ROOT = Path(__file__).parents[2]


@pytest.mark.waits
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
