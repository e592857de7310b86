"""Many seeds, one after another or in several processes at a time."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from random import Random

from tests.simulation.clock import Backend
from tests.simulation.keyed import keyed
from tests.simulation.scenario import Scenario, generate
from tests.simulation.shared import shared
from tests.simulation.simulation import run
from tests.simulation.trio_order import in_one_order

_PORTION = 100
"""Seeds that a process takes at a time: about two seconds."""


@dataclass(frozen=True)
class Histories:
    """Which history a seed stands for: on this backend, with so many instances or none, by key."""

    backend: Backend = "asyncio"
    instances: tuple[int, ...] = ()
    by_key: bool = False

    def of(self, seed: int) -> Scenario:
        """Return the history of a seed. It decides how many instances there are, of several."""
        scenario = generate(seed, self.backend)
        if self.by_key:
            scenario = keyed(scenario)
        if not self.instances:
            return scenario
        number = Random(f"number {seed}").choice(self.instances)
        return shared(scenario, number) if number else scenario


@dataclass(frozen=True)
class Judged:
    """A seed that was run, and what the oracle says against it, or None."""

    seed: int
    failure: str | None


def run_many(histories: Histories, seeds: range, jobs: int) -> Generator[Judged]:
    """Run seeds, with more than one job in so many processes. They come in no certain order.

    Whoever closes the iterator waits until the processes have ended the seeds that they have begun,
    some seconds.
    """
    if jobs == 1:
        _prepare(histories.backend)
        for seed in seeds:
            yield _judge(histories, seed)
        return
    portions = [seeds[start : start + _PORTION] for start in range(0, len(seeds), _PORTION)]
    # Not a fork: the progress bar has a thread.
    pool = ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=_begin, initargs=(histories.backend,)
    )
    try:
        for done in as_completed(pool.submit(_judge_all, histories, each) for each in portions):
            yield from done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(backend: Backend) -> None:
    # Ctrl-C reaches every process of the terminal; the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prepare(backend)


def _prepare(backend: Backend) -> None:
    if backend == "trio":
        # Before the freeze: Hypothesis looks for who refers to the random numbers it is given.
        in_one_order(lambda: None)
    gc.freeze()  # what is imported stays: the collector need not look at it after each seed


def _judge_all(histories: Histories, seeds: range) -> list[Judged]:
    return list(map(partial(_judge, histories), seeds))


def _judge(histories: Histories, seed: int) -> Judged:
    outcome = run(histories.of(seed))
    return Judged(seed, None if outcome.failure is None else outcome.text)
