"""``python -m tests.simulation``: run seeds, or repeat one of them exactly."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from tests.simulation.many import Histories, run_many
from tests.simulation.progress import progress
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import shrink
from tests.simulation.simulation import SimulationOutcome, run
from tests.simulation.trio_order import has_one_order

_INTERRUPTED = 130
"""What a shell expects of a command that Ctrl-C has ended."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a scenario failed, 130 after Ctrl-C, otherwise 0."""
    options = _parser().parse_args(arguments)
    return _run(options) if options.seed is None else _replay(options)


def _run(options: argparse.Namespace) -> int:
    began, done, failed = time.perf_counter(), 0, 0
    seeds = range(options.first, options.first + options.seeds)
    judged = run_many(_histories(options), seeds, options.jobs)
    interrupted = False
    with progress("simulating", len(seeds)) as advance, closing(judged):
        try:
            for one in judged:
                done += 1
                advance()
                if one.failure is not None:
                    failed += 1
                    command = replay_command(
                        one.seed, options.backend, options.instances, by_key=options.by_key
                    )
                    print(f"seed {one.seed}: {one.failure}\n  {command}", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - began
    rate = done / seconds if seconds else 0.0
    print(f"{done} seeds, {failed} failed, {rate:.1f} seeds a second")
    return _INTERRUPTED if interrupted else 1 if failed else 0


def _histories(options: argparse.Namespace) -> Histories:
    return Histories(options.backend, numbers(options.instances), options.by_key)


def replay_command(seed: int, backend: str, instances: str = "", *, by_key: bool = False) -> str:
    """Return the command line that repeats a seed."""
    chosen = "" if backend == "asyncio" else f" --backend {backend}"
    chosen += "" if backend == "asyncio" or has_one_order() else " --times 50"
    chosen += f" --instances {instances}" if instances else ""
    chosen += " --by-key" if by_key else ""
    return f"python -m tests.simulation --seed {seed}{chosen}"


def _replay(options: argparse.Namespace) -> int:
    scenario = _histories(options).of(options.seed)
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


def _until_it_fails(scenario: Scenario, times: int) -> SimulationOutcome:
    """Run a scenario until it fails, at most so often. Without Hypothesis trio's runs differ."""
    outcome = run(scenario)
    while outcome.failure is None and times > 1:
        outcome, times = run(scenario), times - 1
    return outcome


def _summary(outcome: SimulationOutcome) -> str:
    return (
        f"{'passed' if outcome.failure is None else 'FAILED'}: {outcome.text}\n"
        f"{outcome.published} events, {outcome.effects} effects, "
        f"{outcome.seconds:.1f} s of virtual time, trace {outcome.digest}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
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
        "--instances",
        type=_instances,
        default="",
        help="how many processes share the feed: a number, or a range as 2..4",
    )
    parser.add_argument(
        "--by-key", action="store_true", help="the application handles events by key"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--jobs", type=_jobs, default=1, help="in how many processes; one for each core is best"
    )
    return parser


def _jobs(text: str) -> int:
    jobs = int(text)
    if jobs < 1:
        raise argparse.ArgumentTypeError(f"{jobs} is no number of processes: at least 1 is needed")
    return jobs


def _instances(text: str) -> str:
    try:
        numbers(text)
    except ValueError:
        message = f"{text!r} is neither a number of processes nor a range as 2..4"
        raise argparse.ArgumentTypeError(message) from None
    return text


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a range as 2..4, or of one number. Raises ValueError for any other."""
    if text in ("", "0"):
        return ()
    first, dots, last = text.partition("..")
    low, high = int(first), int(last if dots else first)
    if not 1 <= low <= high:
        raise ValueError(text)
    return tuple(range(low, high + 1))


if __name__ == "__main__":
    sys.exit(main())
