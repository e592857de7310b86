"""``python -m feedapi_client.testing.simulator``: run seeds, or repeat one of them exactly."""

from __future__ import annotations

import argparse
import gc
import sys
import time

from feedapi_client.testing.simulator.scenario import Scenario, generate
from feedapi_client.testing.simulator.shared import shared
from feedapi_client.testing.simulator.shrink import shrink
from feedapi_client.testing.simulator.simulation import Outcome, run
from feedapi_client.testing.simulator.trio_order import has_one_order, in_one_order


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a scenario failed, otherwise 0."""
    options = _parser().parse_args(arguments)
    return _run(options) if options.seed is None else _replay(options)


def _run(options: argparse.Namespace) -> int:
    if options.backend == "trio":
        # Before the freeze: Hypothesis looks for who refers to the random numbers it is given.
        in_one_order(lambda: None)
    gc.freeze()  # what is imported stays: the collector need not look at it after each seed
    began, failed = time.perf_counter(), 0
    for seed in range(options.first, options.first + options.seeds):
        outcome = run(_scenario(seed, options))
        if outcome.failure is not None:
            failed += 1
            command = replay_command(seed, options.backend, options.instances)
            print(f"seed {seed}: {outcome.text}\n  {command}")
    seconds = time.perf_counter() - began
    rate = options.seeds / seconds if seconds else 0.0
    print(f"{options.seeds} seeds, {failed} failed, {rate:.1f} seeds a second")
    return 1 if failed else 0


def _scenario(seed: int, options: argparse.Namespace) -> Scenario:
    scenario = generate(seed, options.backend)
    return shared(scenario, options.instances) if options.instances else scenario


def replay_command(seed: int, backend: str, instances: int = 0) -> str:
    """Return the command line that repeats a seed."""
    chosen = "" if backend == "asyncio" else f" --backend {backend}"
    chosen += "" if backend == "asyncio" or has_one_order() else " --times 50"
    chosen += f" --instances {instances}" if instances else ""
    return f"python -m feedapi_client.testing.simulator --seed {seed}{chosen}"


def _replay(options: argparse.Namespace) -> int:
    scenario = _scenario(options.seed, options)
    outcome = _until_it_fails(scenario, options.times)
    if outcome.failure is not None and options.shrink:
        rule = outcome.failure
        scenario = shrink(
            scenario, lambda smaller: _until_it_fails(smaller, options.times).failure == rule
        )
        outcome = _until_it_fails(scenario, options.times)
    print(scenario)
    if options.trace:
        print("\n".join(outcome.trace))
    print(_summary(outcome))
    return 0 if outcome.failure is None else 1


def _until_it_fails(scenario: Scenario, times: int) -> Outcome:
    """Run a scenario until it fails, at most so often. Without Hypothesis trio's runs differ."""
    outcome = run(scenario)
    while outcome.failure is None and times > 1:
        outcome, times = run(scenario), times - 1
    return outcome


def _summary(outcome: Outcome) -> str:
    return (
        f"{'passed' if outcome.failure is None else 'FAILED'}: {outcome.text}\n"
        f"{outcome.published} events, {outcome.effects} effects, "
        f"{outcome.seconds:.1f} s of virtual time, trace {outcome.digest}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m feedapi_client.testing.simulator",
        description="Simulate a consumer, its store and its publisher on virtual time.",
    )
    parser.add_argument("--seed", type=int, help="repeat this seed, and print its steps")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--shrink", action="store_true", help="leave out what need not happen")
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        help="repeat it until it fails, at most so often (trio without Hypothesis)",
    )
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument(
        "--instances", type=int, default=0, help="how many processes share the feed"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
