"""The wheel and the source distribution: what is in them, and that they can be installed and used.

`FEEDAPI_DIST` names a folder with both, to check those that will be published.
"""

from __future__ import annotations

import email
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import feedapi_client
from feedapi_client.testing import Publisher
from tests.packaging.lowest import ROOT, lowest_versions

pytestmark = pytest.mark.slow

_WHEEL_BYTES = 1_300_000
_SDIST_BYTES = 6_000_000
MODULE = (sys.executable, "-m")
CORE = {"anyio", "h11", "httptools", "httpx", "msgspec", "orjson", "tenacity"}


def run(*command: object, status: int = 0, **options: Any) -> str:
    """Return what a command prints, after it has ended with a status."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    return printed


def build(folder: Path) -> Path:
    """Build both distributions into the folder."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1764028800"}
    run(*MODULE, "hatchling", "build", "-d", folder, cwd=ROOT, env=environment)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("FEEDAPI_DIST")
    return Path(given) if given else build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (file,) = dist.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (file,) = dist.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> dict[str, bytes]:
    """What is in the wheel, by path; the metadata's folder as ``dist-info``."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    folder = f"feedapi_client-{feedapi_client.__version__}.dist-info/"
    return {name.replace(folder, "dist-info/"): data for name, data in files.items()}


@pytest.fixture(scope="module")
def metadata(in_wheel: dict[str, bytes]) -> email.message.Message:
    return email.message_from_bytes(in_wheel["dist-info/METADATA"])


def test_two_builds_are_the_same(dist: Path, tmp_path: Path) -> None:
    if "FEEDAPI_DIST" in os.environ:
        dist = build(tmp_path / "first")
    for again in build(tmp_path / "second").iterdir():
        assert again.read_bytes() == (dist / again.name).read_bytes(), again.name


def test_twine_finds_nothing_to_say(wheel: Path, sdist: Path) -> None:
    run(*MODULE, "twine", "check", "--strict", wheel, sdist)


def test_the_wheel_holds_the_package_and_nothing_else(
    wheel: Path, in_wheel: dict[str, bytes]
) -> None:
    folders = {"feedapi_client", "pyspark_feedapi", "dist-info"}
    assert {name.split("/")[0] for name in in_wheel} == folders
    source = {
        str(path.relative_to(ROOT)).replace("feedapi_client/spark/pyspark", "pyspark")
        for path in (ROOT / "feedapi_client").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in in_wheel if not name.startswith("dist-info/")} == source
    assert "feedapi_client/py.typed" in source
    assert wheel.stat().st_size < _WHEEL_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_source_distribution_can_be_tested(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".ci/run", "PKG-INFO"}
    assert needed <= set(names)
    assert "tests/conftest.py" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("build/")]
    assert sdist.stat().st_size < _SDIST_BYTES


def test_the_metadata_says_what_it_is(
    metadata: email.message.Message, in_wheel: dict[str, bytes]
) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("feedapi-client", feedapi_client.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert in_wheel["dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    entry_points = in_wheel["dist-info/entry_points.txt"].decode()
    assert "feedapi = feedapi_client.cli:main" in entry_points
    assert "feedapi_client = feedapi_client.testing.pytest_plugin" in entry_points


def test_the_core_needs_little(metadata: email.message.Message) -> None:
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    assert {each.name for each in required if each.marker is None} == CORE
    assert {line.partition("==")[0] for line in lowest_versions()} == CORE


def test_the_lowest_versions_have_no_known_defect() -> None:
    """Also of what the dependencies depend on: h11 before 0.16 takes one chunk for two."""
    resolve = (*MODULE, "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate")
    found = run(*resolve, "--resolution", "lowest", "pyproject.toml", cwd=ROOT)
    versions = dict(line.split("==") for line in found.split())
    assert Version(versions["h11"]) >= Version("0.16")


_OPEN = """
import sys, anyio
from feedapi_client.operations.opening import open_store

async def main():
    async with open_store(sys.argv[1], create=True) as store:
        print("feeds:", await store.feeds())

anyio.run(main)
"""
_IMPORT = """
import sys
from importlib import import_module
from pkgutil import walk_packages

found = import_module(sys.argv[1])
for each in walk_packages(getattr(found, "__path__", ()), f"{found.__name__}."):
    try:
        import_module(each.name)
    except ImportError as missing:  # of another extra
        assert "pip install" in str(missing), missing
print("imported")
"""
_DJANGO = """
import django
from django.conf import settings

own = ("admin", "auth", "contenttypes")
apps = [f"django.contrib.{name}" for name in own]
settings.configure(INSTALLED_APPS=[*apps, "feedapi_client.django"])
django.setup()
"""
_SERVE = (
    "from feedapi_client.testing import Publisher\nwith Publisher(1).serve() as url: print(url)"
)
_NOBODY = "127.0.0.1:1"
EXTRAS = {
    "sql": (_IMPORT, "feedapi_client.stores.sql", "imported"),
    "postgresql": (_OPEN, f"postgresql://{_NOBODY}/db", "connection was refused"),
    "asyncpg": (_OPEN, f"postgresql+asyncpg://{_NOBODY}/db", "connection was refused"),
    "psycopg": (_IMPORT, "feedapi_client.stores.postgres", "imported"),
    "sqlite": (_OPEN, "sqlite:///c.db", "feeds: []"),
    "mysql": (_OPEN, f"mysql://{_NOBODY}/db", "connection was refused"),
    "django": (_DJANGO + _IMPORT, "feedapi_client.django", "imported"),
    "redis": (_OPEN, f"redis://{_NOBODY}/0", "connection was refused"),
    "spark": (_IMPORT, "feedapi_client.spark", "imported"),
    "liftbridge": (_OPEN, f"liftbridge://{_NOBODY}/orders", "UNAVAILABLE"),
    "telemetry": (_IMPORT, "feedapi_client.telemetry", "imported"),
    "monitor": (_IMPORT, "feedapi_client.monitor", "imported"),
    "testing": (_SERVE, "", "http://127.0.0.1:"),
}
"""A program for each extra, its argument, and what it prints."""


def with_lowest_versions(extra: str, folder: Path) -> Path:
    """Install an extra with its lowest versions, and what is chosen beside them."""
    run(*MODULE, "uv", "venv", "-q", "--python", sys.executable, folder)
    install = (*MODULE, "uv", "pip", "install", "-q", "--python", folder / "bin" / "python")
    run(*install, f"{ROOT}[{extra}]", *lowest_versions(extra))
    return folder / "bin"


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.timeout(600)
def test_an_extra_works_with_its_lowest_versions(extra: str, tmp_path: Path) -> None:
    program, argument, says = EXTRAS[extra]
    python = with_lowest_versions(extra, tmp_path / "environment") / "python"
    words = [python, "-c", program, argument]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert says in done.stdout + done.stderr


def test_every_extra_is_tried_with_its_lowest_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Java comes with a wheel of one version, and Delta with one PySpark.
    others = {"cli", "spark-local", "delta", "docs", "dev"}
    assert set(project["optional-dependencies"]) == EXTRAS.keys() | others


def test_the_command_line_works_with_its_lowest_versions(tmp_path: Path) -> None:
    """And with what is chosen beside them: an old typer and a new click do not fit."""
    feedapi = with_lowest_versions("cli", tmp_path) / "feedapi"
    assert "--handler" in run(feedapi, "run", "--help")
    assert "Missing option" in run(feedapi, "run", "http://127.0.0.1:9/feed", status=2)
    once = ("cat", "http://127.0.0.1:9/feed", "--give-up-after", "0")
    assert "the connection was refused" in run(feedapi, *once, status=1)


def test_a_release_is_built_by_the_build_tools_alone_and_published_by_a_token_alone() -> None:
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", release)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used), used
    parts = re.split(r"^  (\w+):$", release.partition("\njobs:\n")[2], flags=re.MULTILINE)
    jobs = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert re.findall(r"pip install (.*)", jobs["build"]) == ["'hatchling>=1.25'"]
    assert "sha256sum" in jobs["build"]
    assert [name for name in jobs if "hatchling build" in jobs[name]] == ["build"]
    publish = jobs["publish"]
    assert re.findall(r"^      ([\w-]+: (?:read|write))", publish, re.MULTILINE) == [
        "id-token: write"
    ]
    assert "pip install" not in publish
    assert publish.index("$HASHES") < publish.index("gh-action-pypi-publish")


READ = """
import asyncio, sys
import feedapi_client
from feedapi_client import FeedConsumer, MemoryCursorStore, SQLiteCursorStore, SyncFeedConsumer

async def main(url):
    async with FeedConsumer(url, store=SQLiteCursorStore("c.db"), follow=False) as consumer:
        return [event.json()["n"] async for event in consumer]

print(asyncio.run(main(sys.argv[1])))
with SyncFeedConsumer(sys.argv[1], store=MemoryCursorStore(), follow=False) as consumer:
    print(sum(len(batch) for batch in consumer.batches()))
print(feedapi_client.__file__)
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"sqlalchemy", "typer", "pyspark", "redis", "uvicorn", "pytest", "nats"}))
"""


def test_the_installed_wheel_reads_a_feed(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the core dependencies only."""
    venv.create(tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / "bin"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}

    def run_there(*command: object, status: int = 0) -> str:
        return run(*command, status=status, env=environment, cwd=tmp_path)

    pip = (scripts / "python", "-m", "pip")
    run_there(*pip, "install", "--quiet", wheel)
    listed = run_there(*pip, "list", "--format=freeze").splitlines()
    names = {line.partition("==")[0] for line in listed}
    assert names & CORE == CORE
    assert len(names) < 18, sorted(names)
    publisher = Publisher(partitions=1)
    publisher.extend(0, [{"n": n} for n in range(3)])
    with publisher.serve() as url:
        numbers, count, file, loaded = run_there(
            scripts / "python", "-W", "error", "-c", READ, url
        ).splitlines()
    assert (numbers, count, loaded) == ("[0, 1, 2]", "3", "[]")
    assert file.startswith(str(tmp_path))
    told = run_there(scripts / "feedapi", "--version", status=1)
    assert "pip install 'feedapi-client[cli]'" in told
