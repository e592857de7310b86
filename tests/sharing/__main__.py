"""Disturb instances that share a feed: ``python -m tests.sharing --database postgresql``.

Ends with code 0 if each event is there exactly once and in order; with Redis, which takes part in
no transaction, if none is lost. With ``--graceful-only`` that is exactly once in any database.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from tests.servers import run_postgres, run_redis
from tests.sharing.disturbances import KINDS, Kind, Outcome, run_disturbances
from tests.sharing.in_memory import restart_in_memory

DATABASES = ("postgresql", "sqlite", "redis", "memory")


@contextmanager
def database(kind: str) -> Iterator[str]:
    """Start a server, or make a directory for a SQLite file."""
    if kind == "postgresql":
        with run_postgres() as server:
            yield server.dsn
    elif kind == "redis":
        with run_redis() as redis:
            yield redis.url
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield os.path.join(directory, "app.db")


def progress(outcome: Outcome) -> None:
    count = outcome.disturbances.total()
    if count % 20 == 0:
        print(f"{count} disturbances", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sharing", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--events", type=int, default=200, help="number of disturbances")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--graceful-only", action="store_true", help="graceful restarts only, and no transaction"
    )
    parser.add_argument(
        "--without-fencing",
        action="store_true",
        help="save cursors whatever is stored, so that the check has to fail. Not with SQLite: "
        "whoever pauses in its transaction holds the file, and nobody can claim its leases",
    )
    args = parser.parse_args()
    if args.database == "memory" and not args.graceful_only:
        parser.error("memory is shared by the instances of one process: --graceful-only")
    if args.database == "memory":
        outcome = restart_in_memory(args.events, instances=args.processes, seed=args.seed)
    else:
        outcome = disturb(args)
    print(outcome)
    at_least_once = args.database == "redis" and not args.graceful_only
    sound = outcome.lost == 0 if at_least_once else outcome.exactly_once
    print("sound" if sound else "NOT sound")
    sys.exit(0 if sound else 1)


def disturb(args: argparse.Namespace) -> Outcome:
    """Run the disturbances of processes."""
    kinds: tuple[Kind, ...] = ("restart",) if args.graceful_only else KINDS
    if args.without_fencing:
        kinds = ("pause",)  # a process that wakes up with a batch in flight is what fencing is for
    options = ["--without-transaction"] if args.graceful_only else []
    options += ["--without-fencing"] if args.without_fencing else []
    with database(args.database) as where:
        return anyio.run(
            lambda: run_disturbances(
                where,
                events=args.events,
                processes=args.processes,
                kinds=kinds,
                options=tuple(options),
                seed=args.seed,
                stop_when_repeated=args.without_fencing,
                progress=progress,
            )
        )


if __name__ == "__main__":
    main()
