"""The command: it runs seeds, repeats one of them, and shrinks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation import many, planted, planted_planner, planted_runtime
from tests.simulation.__main__ import main
from tests.simulation.many import Histories, run_many
from tests.simulation.scenario import Scenario, Settings, Step, generate
from tests.simulation.shrink import shrink
from tests.simulation.simulation import SimulationOutcome, run


def test_a_seed_is_printed_with_its_steps_and_its_outcome(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(str(generate(3)))
    assert "passed: every event was applied in order" in shown


def test_the_trace_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace", "--backend", "trio"]) == 0
    assert "GET /feed -> 200" in capsys.readouterr().out


def test_seeds_that_pass_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "5"]) == 0
    assert "2 seeds, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_each_seed_is_run_once_by_several_processes() -> None:
    judged = list(run_many(Histories(), range(40, 120), jobs=2))
    assert sorted(one.seed for one in judged) == list(range(40, 120))
    assert [one for one in judged if one.failure is not None] == []


def test_an_interrupted_run_says_how_far_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def third_seed_is_interrupted(scenario: Scenario) -> SimulationOutcome:
        if scenario.seed == "2":
            raise KeyboardInterrupt
        return run(scenario)

    monkeypatch.setattr(many, "run", third_seed_is_interrupted)
    assert main(["--seeds", "5"]) == 130
    assert "2 seeds, 0 failed" in capsys.readouterr().out


def test_no_process_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--jobs", "0"])
    assert "argument --jobs: 0 is no number of processes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_repeats_seeds_on_trio_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.simulation"]
    done = subprocess.run(
        [*command, "--seeds", "1", "--backend", "trio"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert "1 seeds, 0 failed" in done.stdout


def test_a_seed_that_fails_names_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_runtime.batch_loses_an_event(monkeypatch)
    assert main(["--seeds", "1"]) == 1
    assert "python -m tests.simulation --seed 0\n" in capsys.readouterr().out
    assert main(["--seed", "0"]) == 1
    assert "FAILED: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_failing_scenario_is_shrunk_to_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_planner.successor_from_the_start(monkeypatch)
    found = planted.found_by(range(150))
    assert found is not None
    seed, rule = found
    scenario = generate(seed)
    smaller = shrink(scenario, lambda candidate: run(candidate).failure == rule, max_runs=150)
    assert run(smaller).failure == rule
    assert len(smaller.steps) <= 4
    assert "split" in [step.do for step in smaller.steps]


def test_shrinking_leaves_out_everything_that_does_not_matter() -> None:
    steps = tuple(Step(1.0, "publish", {"count": n, "entities": 1}) for n in range(1, 9))
    scenario = Scenario("1", Settings(partitions=3, latency=0.3), steps)

    def fails(candidate: Scenario) -> bool:
        return any(step.how["count"] >= 5 for step in candidate.steps)

    shrunk = shrink(scenario, fails)
    assert shrunk.settings == Settings()
    assert [(step.after, step.how["count"]) for step in shrunk.steps] == [(0.0, 5)]


def test_shrinking_ends_after_so_many_runs() -> None:
    runs = []
    shrink(generate(1), lambda candidate: bool(runs.append(candidate)), max_runs=7)
    assert len(runs) == 7
