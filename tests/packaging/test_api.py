"""The public signatures are those of ``api.txt``, and every public module says what is public."""

from __future__ import annotations

import difflib

import pytest

from tests.docs.snippets import PAGES_FOLDER
from tests.packaging.api import FILE, MODULES, exports, signatures

_WHAT_TO_DO = (
    "\nthe public signatures changed. Is this meant? What was there has to go on working until the "
    "next major version (docs/pages/api.md). Then: python -m tests.packaging.api"
)


def test_public_signatures_change_on_purpose_only() -> None:
    stored, found = FILE.read_text().splitlines(), signatures().splitlines()
    changes = difflib.unified_diff(stored, found, "api.txt", "the source", lineterm="", n=0)
    assert stored == found, "\n".join(changes) + _WHAT_TO_DO


@pytest.mark.parametrize("module", MODULES)
def test_every_public_module_says_what_is_public(module: str) -> None:
    assert exports(module), f"{module} has no __all__"


def test_the_public_modules_are_documented() -> None:
    listed = (PAGES_FOLDER / "reference/index.md").read_text()
    assert [module for module in MODULES if f"`{module}`" not in listed] == []
