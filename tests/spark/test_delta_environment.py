"""The environment of Delta's tests is made once, whole, and of the jars that are meant."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import components
from tests.spark import delta_environment
from tests.spark.delta_environment import DELTA, environment, location

CONTENT = b"a jar"


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders for which jars were downloaded, into an empty cache."""
    made: list[Path] = []

    def download(spark: Path, folder: Path) -> None:
        made.append(folder)
        jars = folder / "ivy" / "jars"
        jars.mkdir(parents=True)
        for artifact in delta_environment.JARS:
            (jars / f"io.delta_{artifact}-{DELTA}.jar").write_bytes(CONTENT)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(delta_environment, "_run", lambda *_, **__: None)
    monkeypatch.setattr(delta_environment, "_download_jars", download)
    digests = dict.fromkeys(delta_environment.JARS, hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(delta_environment, "JARS", digests)
    return made


def test_of_several_that_ask_at_once_one_makes_it(made: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: environment(), range(4))) == {location()}
    assert len(made) == 1
    assert len(list((location() / "jars").glob("*.jar"))) == len(delta_environment.JARS)


def test_another_jar_than_the_one_meant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delta_environment.JARS, "delta-storage", "0" * 64)
    with pytest.raises(RuntimeError, match=rf"delta-storage-{DELTA}.jar has the digest .*, not 00"):
        environment()
    assert not location().exists()


def test_packages_that_can_not_be_had_are_a_missing_component(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(command: list[str], **_: str) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="no index\nno pyspark\n")

    monkeypatch.setattr(delta_environment, "_run", fails)
    with pytest.raises(components.MissingError, match="failed: no pyspark"):
        environment()
    assert not list(location().parent.glob("tmp*"))
