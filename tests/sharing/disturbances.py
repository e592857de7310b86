"""Kill, pause and restart instances that share a feed, and check what their database holds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import anyio
import psycopg
import redis
from sqlalchemy.exc import SQLAlchemyError

from tests import warm
from tests.crash.application import application_class
from tests.crash.comparison import Comparison
from tests.crash.traffic import Traffic
from tests.sharing.databases import Database, sql_effects
from tests.sharing.sql_application import SQLApplication
from tests.sharing.waits import longest_waits
from tests.sharing.worker import SHARE

Kind = Literal["kill", "pause", "restart", "terminate", "failover"]
KINDS: tuple[Kind, ...] = ("kill", "pause", "restart")
"""What happens to processes."""
SERVER_KINDS: tuple[Kind, ...] = (*KINDS, "pause", "terminate", "failover")
"""What happens to processes and to the server of their database."""
_ROOT = Path(__file__).parents[2]
_SILENCE_SECONDS = 60.0  # a safety net
_REST_EVERY = 10
"""After so many disturbances the instances are left alone until all is handled."""


@dataclass
class Outcome(Comparison):
    """What happened, and what the database holds."""

    disturbances: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    """Instances that ended with an error, for example of their database, and were started again."""
    splits: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """The longest wait of any instance for an operation of its store, in seconds."""
    silence: float = 0.0
    """The longest time in which nobody handled anything, although there was something to handle and
    nothing was disturbed any more, in seconds."""


class Worker:
    """An instance in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.process = warm.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=self._log)
        self.paused_until: float | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def pause(self, seconds: float) -> None:
        """Stop it for a while."""
        self.send(signal.SIGSTOP)
        self.paused_until = time.monotonic() + seconds

    def go_on(self) -> None:
        """Let it go on after a pause."""
        self.send(signal.SIGCONT)
        self.paused_until = None

    def log(self) -> str:
        """Return what it wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Kill it, at the latest now."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Effects:
    """What the instances wrote."""

    def __init__(self, database: str) -> None:
        self._database = database

    async def create(self) -> None:
        """Empty the database."""
        if self._database.startswith(("redis:", "unix:")):
            self._redis().flushall()
        elif self._is_sql:
            await SQLApplication.create(self._database)
        else:
            await application_class(self._database).create(self._database)

    def found(self) -> list[tuple[str, int]]:
        """Return entity and number of each effect, in the order of insertion."""
        if self._is_sql:
            return self._of_server()
        if self._database.startswith(("redis:", "unix:")):
            found: Any = self._redis().lrange("effects", 0, -1)
            rows = [row.decode().split(" ", 2) for row in found]
            return [(entity, int(n)) for _, n, entity in rows]
        application = application_class(self._database)(self._database)
        return [(row.entity, row.n) for row in application.rows()]

    @property
    def _is_sql(self) -> bool:
        return self._database.startswith(("postgresql+", "mysql+"))

    def _of_server(self) -> list[tuple[str, int]]:
        """Wait for a server that is just starting again."""
        deadline = time.monotonic() + _SILENCE_SECONDS
        while True:
            try:
                return sql_effects(self._database)
            except (SQLAlchemyError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _redis(self) -> redis.Redis:
        return redis.Redis.from_url(self._database)


async def run_disturbances(
    database: str | Database,
    *,
    events: int,
    processes: int = 4,
    kinds: tuple[Kind, ...] = KINDS,
    options: tuple[str, ...] = (),
    seed: int | None = None,
    lease: float = SHARE.lease_seconds,
    stop_when_repeated: bool = False,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Disturb instances at random, then let them handle the rest.

    Arguments:
        database: a PostgreSQL DSN, a SQLite file, the URL of a Redis server or, with a driver, of
            a SQL server. It is emptied.
        events: how many disturbances.
        processes: how many instances.
        kinds: which disturbances.
        options: of the workers.
        lease: the length of their leases, in seconds; ``--lease`` in `options` counts before it.
        stop_when_repeated: end as soon as an event was handled twice.
        progress: called after each disturbance.
    """
    random, outcome, started = Random(seed), Outcome(), time.monotonic()
    database = Database(database) if isinstance(database, str) else database
    effects = Effects(database.where)
    await effects.create()
    waits = tempfile.mkdtemp(prefix="feedapi-waits-")
    options = ("--waits", waits, "--lease", str(lease), *options)
    traffic = Traffic(random, split_every=max(2, events // 16))
    with traffic.publisher.serve() as url:
        command = [sys.executable, "-m", "tests.sharing.worker", url, database.where, *options]
        with _workers(command, processes) as workers:
            while (number := outcome.disturbances.total()) < events:
                kind = random.choice(kinds)
                if kind in ("terminate", "failover"):
                    _disturb_server(database, kind, outcome)
                else:
                    _disturb(workers, kind, command, random, outcome, lease)
                if number % 3 == 0:
                    traffic.disturb()
                traffic.publish(random.randint(10, 60))
                await anyio.sleep(random.uniform(0.05, 0.4) * lease / SHARE.lease_seconds)
                _tend(workers, command, outcome)
                progress(outcome)
                if number % _REST_EVERY == _REST_EVERY - 1:
                    _rest(workers, command, effects, traffic, outcome, lease)
                if stop_when_repeated and number % 5 == 4 and _repeated(effects):
                    break
            _rest(workers, command, effects, traffic, outcome, lease)
            for worker in workers:
                _stop(worker, workers)
    outcome.waits = longest_waits(waits)
    shutil.rmtree(waits)
    outcome.splits = dict(traffic.splits)
    outcome.compare(traffic.published, effects.found())
    outcome.seconds = time.monotonic() - started
    return outcome


@contextmanager
def _workers(command: list[str], count: int) -> Iterator[list[Worker]]:
    workers = [Worker(command) for _ in range(count)]
    try:
        yield workers
    except BaseException:
        _show(workers, "the end of a log")
        raise
    finally:
        for worker in workers:
            worker.close()


def _disturb_server(database: Database, kind: Kind, outcome: Outcome) -> None:
    disturb = database.terminate if kind == "terminate" else database.failover
    assert disturb is not None, "this database has no server"
    with suppress(psycopg.OperationalError):  # it is just starting again
        disturb()
        outcome.disturbances[kind] += 1


def _disturb(
    workers: list[Worker],
    kind: Kind,
    command: list[str],
    random: Random,
    outcome: Outcome,
    lease: float,
) -> None:
    place = random.randrange(len(workers))
    worker = workers[place]
    if kind == "pause" and sum(one.paused_until is not None for one in workers) >= len(workers) / 2:
        return  # somebody has to take over
    outcome.disturbances[kind] += 1
    if kind == "pause":
        worker.pause(lease * random.uniform(0.3, 2.5))
        return
    if kind == "kill":
        worker.close()
    else:
        _stop(worker, workers)
    workers[place] = Worker(command)


def _stop(worker: Worker, workers: list[Worker]) -> None:
    """Stop gracefully. It may have to wait for the lock of another one that is paused."""
    worker.go_on()
    worker.send(signal.SIGTERM)
    deadline = time.monotonic() + _SILENCE_SECONDS
    while worker.process.poll() is None:
        assert time.monotonic() < deadline, f"it does not stop: {worker.log()}"
        _let_paused_go_on(workers)
        time.sleep(0.01)
    worker.close()


def _let_paused_go_on(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.paused_until is not None and time.monotonic() >= worker.paused_until:
            worker.go_on()


def _tend(workers: list[Worker], command: list[str], outcome: Outcome) -> None:
    """Let paused ones go on in time, and start those again that ended, as a supervisor does."""
    _let_paused_go_on(workers)
    for place, worker in enumerate(workers):
        if worker.process.poll() is not None:
            outcome.ended += 1
            if os.environ.get("SHOW_LOGS"):
                print(worker.log()[-2000:], file=sys.stderr)
            worker.close()
            workers[place] = Worker(command)


def _rest(
    workers: list[Worker],
    command: list[str],
    effects: Effects,
    traffic: Traffic,
    outcome: Outcome,
    lease: float,
) -> None:
    """Wait until all is handled. Paused processes go on when their time has come."""
    total, before, shown = traffic.published.total(), -1, False
    since = time.monotonic()
    while (count := len(set(effects.found()))) < total:
        silence = time.monotonic() - since
        outcome.silence = max(outcome.silence, silence)
        if count != before:
            before, since, shown = count, time.monotonic(), False
        elif not shown and silence > 2 * lease:
            shown = True
            _show(workers, f"nothing was handled for two leases, {total - count} events to go")
        elif silence > _SILENCE_SECONDS:
            return
        _tend(workers, command, outcome)
        time.sleep(0.2)


def _show(workers: list[Worker], what: str) -> None:
    for worker in workers:
        worker.send(signal.SIGUSR1)  # to log where it stands
    time.sleep(0.3)
    for worker in workers:
        until = worker.paused_until
        state = "" if until is None else f", paused for {until - time.monotonic():.1f} s more"
        print(
            f"{what}; process {worker.process.pid}{state}:\n{worker.log()[-9000:]}",
            file=sys.stderr,
        )


def _repeated(effects: Effects) -> bool:
    return max(Counter(effects.found()).values(), default=0) > 1
