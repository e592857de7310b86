"""Disturb instances that share a feed.

``python -m tests.sharing --database postgresql --disturbances 300`` kills processes, stops them for
up to two and a half leases wherever they are, restarts them, ends sessions of the database, and
lets its server crash and start again. After each ten disturbances it waits until all is handled. It
prints what the database holds in the end, the longest wait of any instance for any operation of its
store, and the longest time in which nobody handled anything while it waited.

Ends with code 0 if each event is there exactly once and in order, and that time was not longer than
two leases; with Redis, which takes part in no transaction, if none is lost. With
``--graceful-only`` that is exactly once in any database.
"""

from __future__ import annotations

import argparse
import sys

import anyio

from tests.sharing.databases import DATABASES, database
from tests.sharing.disturbances import KINDS, SERVER_KINDS, Kind, Outcome, run_disturbances
from tests.sharing.in_memory import restart_in_memory
from tests.testing.virtual_time import virtual_backend


def progress(outcome: Outcome) -> None:
    count = outcome.disturbances.total()
    if count % 20 == 0:
        print(f"{count} disturbances", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sharing", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--disturbances", type=int, default=300)
    parser.add_argument("--lease", type=float, default=3.0, help="seconds")
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
    parser.add_argument(
        "--by-key",
        action="store_true",
        help="handle events by key, and remember in the effects' transaction what is done",
    )
    args = parser.parse_args()
    if args.by_key and args.database in ("memory", "redis"):
        parser.error("--by-key needs a database with transactions")
    if args.database == "memory" and not args.graceful_only:
        parser.error("memory is shared by the instances of one process: --graceful-only")
    if args.database == "memory":
        backend, how = virtual_backend("asyncio")
        outcome = anyio.run(
            lambda: restart_in_memory(args.disturbances, instances=args.processes, seed=args.seed),
            backend=backend,
            backend_options=how,
        )
    else:
        outcome = disturb(args)
    print(outcome)
    at_least_once = args.database == "redis" and not args.graceful_only
    sound = outcome.lost == 0 if at_least_once else outcome.exactly_once
    sound = sound and outcome.silence <= 2 * args.lease
    print("sound" if sound else "NOT sound")
    sys.exit(0 if sound else 1)


def disturb(args: argparse.Namespace) -> Outcome:
    """Run the disturbances of processes."""
    kinds: tuple[Kind, ...] = ("restart",) if args.graceful_only else KINDS
    if args.without_fencing:
        kinds = ("pause",)  # a process that wakes up with a batch in flight is what fencing is for
    options = ["--without-transaction"] if args.graceful_only else []
    options += ["--without-fencing"] if args.without_fencing else []
    options += ["--by-key"] if args.by_key else []
    with database(args.database, args.lease) as shared:
        if kinds is KINDS and shared.failover is not None:
            kinds = SERVER_KINDS
        return anyio.run(
            lambda: run_disturbances(
                shared,
                events=args.disturbances,
                lease=args.lease,
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
