"""The long crash test: ``python -m tests.crash --kills 50 --database postgresql``.

Ends with code 0 if each event is there exactly once, in order, else with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.crash.application import DJANGO, SYNC_PSYCOPG, SYNC_SQLALCHEMY
from tests.crash.runner import Outcome, run_crash_test
from tests.servers import run_mariadb, run_postgres

console = Console()
PREFIXES = {
    "postgresql": "",
    "psycopg": "psycopg+",
    "asyncpg": "asyncpg+",
    "sync-psycopg": SYNC_PSYCOPG,
    "sync-sqlalchemy": SYNC_SQLALCHEMY,
    "django-postgresql": DJANGO,
}
"""What writes to PostgreSQL, and how the name of the database begins."""
DATABASES = (*PREFIXES, "django-mysql", "sqlite")


@contextmanager
def database(kind: str) -> Iterator[str]:
    """Start a database server, or make a directory for a SQLite file."""
    if kind in PREFIXES:
        with run_postgres() as server:
            yield f"{PREFIXES[kind]}{server.dsn}"
    elif kind == "django-mysql":
        with run_mariadb() as mysql:
            yield f"{DJANGO}mysql://{mysql.socket}"
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield os.path.join(directory, "app.db")


def run(args: argparse.Namespace) -> Outcome:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("kills, {task.fields[events]} events"),
        TimeElapsedColumn(),
    )
    with database(args.database) as where, Progress(*columns, console=console) as bar:
        task = bar.add_task(args.database, total=args.kills, events=0)

        def progress(outcome: Outcome) -> None:
            bar.update(task, completed=outcome.kills, events=outcome.events)

        return anyio.run(
            lambda: run_crash_test(
                where,
                kills=args.kills,
                cursor=args.outside_transaction or "inside",
                poison=args.poison,
                threads=args.threads,
                by_key=args.by_key,
                seed=args.seed,
                progress=progress,
            )
        )


def report(outcome: Outcome, args: argparse.Namespace) -> None:
    cursor = args.outside_transaction or "inside"
    table = Table(
        title=f"{args.database}, cursor saved {cursor} the transaction of the effects",
        show_header=False,
    )
    splits = ", ".join(f"{count} {method}" for method, count in sorted(outcome.splits.items()))
    for name, value in (
        ("killed with SIGKILL", outcome.kills),
        ("ended as fenced", outcome.fenced),
        ("splits", splits or "none"),
        ("token rotations", outcome.rotations),
        ("events", outcome.events),
        ("of these, in quarantine", outcome.quarantined),
        ("lost", outcome.lost),
        ("repeated", outcome.repeated),
        ("out of order within their entity", outcome.disordered),
        ("seconds", f"{outcome.seconds:.0f}"),
    ):
        table.add_row(name, str(value))
    console.print(table)
    console.print(
        "[green]each event exactly once, in order"
        if outcome.exactly_once
        else "[red]not exactly once"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash",
        description="Kill a consumer again and again, and check what its database holds.",
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--database",
        choices=DATABASES,
        default="postgresql",
        help="what the application writes with; 'postgresql' is asynchronous SQLAlchemy",
    )
    parser.add_argument(
        "--outside-transaction",
        choices=["before", "after"],
        nargs="?",
        const="after",
        help="save the cursor before or after the transaction of the effects (default: after), "
        "so that the check has to fail",
    )
    parser.add_argument(
        "--poison",
        action="store_true",
        help="let the application fail at some events, which go into quarantine",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="consume without async, by SyncFeedConsumer, in so many threads (SQLite, Django, "
        "sync-*)",
    )
    parser.add_argument(
        "--by-key",
        action="store_true",
        help="handle events by key, and remember in the effects' transaction what is done "
        "(PostgreSQL and SQLite, with async)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="for the traffic and the kill points; the timing of the processes stays random",
    )
    args = parser.parse_args()
    outcome = run(args)
    report(outcome, args)
    sys.exit(0 if outcome.exactly_once else 1)


if __name__ == "__main__":
    main()
