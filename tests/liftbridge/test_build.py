"""The real Liftbridge is built once, whoever asks for it first, and a missing module is named."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from feedapi_client.testing.liftbridge import LIFTBRIDGE_FOLDER, find_liftbridge
from tests import components
from tests.liftbridge.build import build, folder

# Writes down each call; builds a program that is a text.
_GO = """\
#!/bin/sh
echo "$1 CGO_ENABLED=$CGO_ENABLED" >> '{calls}'
case "$1" in
    mod) {download} ;;
    list) printf 'a\\nb\\n' ;;
    build)
        for argument; do
            [ "$before" = -o ] && echo built > "$argument"
            before=$argument
        done
        printf 'a\\nb\\n' >&2
        {end} ;;
esac
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(LIFTBRIDGE_FOLDER, "")  # `build` sets it


def fake_go(folder: Path, *, download: str = "", end: str = ":") -> tuple[str, Path]:
    """A program that does what `build` asks Go for, and the file of its calls."""
    program, calls = folder / "go", folder / "calls"
    download = download or f"""echo '{{"Dir": "{folder}"}}'"""
    program.write_text(_GO.format(calls=calls, download=download, end=end))
    program.chmod(0o755)
    return str(program), calls


def test_of_several_that_ask_at_once_one_builds_it_with_a_bar(tmp_path: Path) -> None:
    go, calls = fake_go(tmp_path)
    shown = io.StringIO()
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(go, Console(file=shown)), range(4)))
    assert built == [folder() / "liftbridge"] * 4
    assert built[0].read_text() == "built\n"
    assert calls.read_text().splitlines() == [
        f"{command} CGO_ENABLED=0" for command in ("mod", "list", "build")
    ]
    assert "building Liftbridge v" in shown.getvalue()
    assert "2/2" in shown.getvalue()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"download": "echo 'no such host' >&2; exit 1"}, "can't be had: no such host"),
        ({"end": "exit 2"}, r"did not build: a \| b"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, given: dict[str, str], reason: str
) -> None:
    go, _ = fake_go(tmp_path, **given)
    with pytest.raises(components.MissingError, match=reason):
        build(go, Console(file=io.StringIO()))
    assert {path.name for path in folder().iterdir()} == {"lock"}


def test_the_folder_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "liftbridge"
    program.touch(0o755)
    monkeypatch.setenv(LIFTBRIDGE_FOLDER, str(tmp_path))
    assert find_liftbridge() == str(program)
    assert components.COMPONENTS["liftbridge"].find() == str(program)
