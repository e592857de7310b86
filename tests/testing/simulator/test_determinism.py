"""A seed decides everything: two runs of it are the same, step by step.

On asyncio. trio offers no public way to seed the order in which its tasks run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest

from feedapi_client.testing.simulator.scenario import generate
from feedapi_client.testing.simulator.simulation import run
from tests.testing.simulator.backends import BACKENDS


def test_a_seed_run_twice_writes_the_same_trace() -> None:
    for seed in range(8):
        first, second = run(generate(seed)), run(generate(seed))
        assert first.trace == second.trace


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_seeds_write_other_traces(backend: Any) -> None:
    assert len({run(generate(seed, backend)).digest for seed in range(8)}) == 8


@pytest.mark.slow
def test_the_trace_does_not_depend_on_hashes_and_addresses() -> None:
    """In fresh processes, where sets and dictionaries of objects have other orders."""
    digests = {_digest_in_a_process(hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def _digest_in_a_process(hash_seed: str) -> str:
    command = [sys.executable, "-m", "feedapi_client.testing.simulator"]
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
