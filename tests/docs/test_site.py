"""The documentation builds without a warning and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [*command, "--config-file", str(ROOT / "docs" / "mkdocs.yml")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_no_asset_comes_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//""")
    imports = re.compile(r"""url\(["']?(?:https?:)?//|@import""")
    for path in site.rglob("*"):
        if path.suffix == ".html":
            text = path.read_text(encoding="utf-8")
            assert not loads.search(text), path
            assert 'class="mermaid"' not in text, f"{path}: the theme would fetch a script for it"
        elif path.suffix == ".css":
            assert not imports.search(path.read_text(encoding="utf-8")), path


def test_a_cell_of_a_table_knows_its_heading(site: Path) -> None:
    """Narrow screens show each row as a block, and the heading in front of each cell."""
    text = (site / "operating.html").read_text(encoding="utf-8")
    assert '<td data-label="live">' in text
    assert "<td>" not in text


@pytest.mark.parametrize("name", ["dashboards/feedapi.json", "alerts/feedapi.rules.yml"])
def test_what_an_operator_installs_can_be_downloaded(site: Path, name: str) -> None:
    assert (site / name).read_bytes() == (ROOT / "docs" / name).read_bytes()
    assert f'href="{name}"' in (site / "operating.html").read_text(encoding="utf-8")


def test_the_reference_has_no_column_of_required_defaults(site: Path) -> None:
    for path in (site / "reference").glob("*.html"):
        assert "<em>required</em>" not in path.read_text(encoding="utf-8"), path
