"""A seed decides everything: two runs of it are the same, step by step.

On trio, too, where Hypothesis seeds the order in which tasks run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from tests.simulation.backends import BACKENDS
from tests.simulation.scenario import generate
from tests.simulation.simulation import run
from tests.simulation.trio_order import in_one_order


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_run_twice_writes_the_same_trace(backend: Any) -> None:
    for seed in range(8):
        first, second = run(generate(seed, backend)), run(generate(seed, backend))
        assert first.trace == second.trace


def test_without_hypothesis_a_program_runs_on_trio_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert in_one_order(lambda: 5) == 5


def test_on_trio_a_program_runs_once_also_if_it_fails() -> None:
    runs = []

    def program() -> None:
        runs.append(1)
        raise KeyError("failed")

    with pytest.raises(KeyError, match="failed"):
        in_one_order(program)
    assert len(runs) == 1


@given(none())
@settings(max_examples=1)
def test_on_trio_a_program_can_run_within_a_test_of_hypothesis(drawn: None) -> None:
    assert in_one_order(lambda: drawn) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_seeds_write_other_traces(backend: Any) -> None:
    assert len({run(generate(seed, backend)).digest for seed in range(8)}) == 8


@pytest.mark.slow
def test_the_trace_does_not_depend_on_hashes_and_addresses() -> None:
    """In fresh processes, where sets and dictionaries of objects have other orders."""
    digests = {_digest_in_a_process(hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def _digest_in_a_process(hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation"]
    done = subprocess.run(
        [*command, "--seed", "10"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_randomness_outside_the_seed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of two runs can fail: here the jitter of pauses is not the seed's."""
    entropy = random.SystemRandom()
    monkeypatch.setattr("random.uniform", entropy.uniform)
    first, second = ([run(generate(seed)).digest for seed in range(15)] for _ in "ab")
    assert first != second


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_process_gets_its_own_randomness_back(backend: Any) -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    run(generate(0, backend))
    assert random.random() == expected
