"""A component that is missing skips its tests with what to install, and CI does not allow it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import components, servers
from tests.components import COMPONENTS, MissingError


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Components are looked for anew, and what is used here is not told."""
    monkeypatch.setattr(components, "used", set())
    monkeypatch.setattr(components, "_PATH", "/nowhere")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv(components.WITHOUT, raising=False)
    components._found.cache_clear()
    yield
    components._found.cache_clear()


def test_a_missing_component_skips_with_what_to_install() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"nginx: not installed.*apt-get install -y"):
        components.require("nginx")
    assert components.available("nginx") is None
    assert components.used == set()


def test_ci_allows_it_only_where_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nginx: not installed"):
        components.require("nginx")
    for names in ("mariadb,nginx", "all"):
        monkeypatch.setenv(components.WITHOUT, names)
        monkeypatch.setenv("PATH", "/nowhere")
        components._found.cache_clear()
        with pytest.raises(pytest.skip.Exception, match="nginx: not installed"):
            components.require("nginx")


def test_what_is_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nginx"
    program.touch(0o755)
    monkeypatch.setattr(components, "_PATH", str(tmp_path))
    assert components.require("nginx") == str(program)
    reason = f"mariadb: not installed. To run its tests: {COMPONENTS['mariadb'].install}"
    found = {*components.used, "mariadb"}  # its program is there, and did not come up
    assert components.table(found, {reason: 7, "memory has no transactions": 2}) == [
        "used: nginx",
        f"missing: mariadb (7 tests of MariaDB skipped): {reason.partition(': ')[2]}",
    ]


def test_what_another_component_needs_is_missing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> str:
        raise MissingError("not installed")

    go = COMPONENTS["go"]._replace(find=nothing)
    monkeypatch.setitem(COMPONENTS, "go", go)
    monkeypatch.setattr("feedapi_client.testing.liftbridge.find_liftbridge", lambda: None)
    assert components.available("liftbridge") is None


def test_a_database_that_does_not_come_up_skips_its_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "mariadbd"
    program.touch(0o755)
    monkeypatch.setattr(components, "_PATH", str(tmp_path))

    def fails(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=b"FATAL ERROR: no share/english")

    monkeypatch.setattr(servers.subprocess, "run", fails)
    with (
        pytest.raises(pytest.skip.Exception, match=r"mariadb: FATAL ERROR: no share/english"),
        ExitStack() as stack,
    ):
        stack.enter_context(servers.run_mariadb())
