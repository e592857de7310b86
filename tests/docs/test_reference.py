"""The API reference has every public name, each on one page, and no others."""

from __future__ import annotations

import importlib
import re
from collections import Counter

import pytest

from tests.docs.snippets import PAGES_FOLDER

REFERENCE = PAGES_FOLDER / "reference"
DOCUMENTED = Counter(
    name
    for path in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
)
MODULES = [
    "feedapi_client",
    "feedapi_client.stores",
    "feedapi_client.quarantine",
    "feedapi_client.operations",
    "feedapi_client.testing",
    "feedapi_client.monitor",
    "feedapi_client.django",
    "feedapi_client.liftbridge",
    "feedapi_client.spark",
]
# Described in the text: classes that protobuf generates have no docstrings.
IN_THE_TEXT = {"feedapi_client.liftbridge.Ack", "feedapi_client.liftbridge.Message"}


def test_no_name_is_documented_twice() -> None:
    assert [name for name, times in DOCUMENTED.items() if times > 1] == []


def test_every_documented_name_exists() -> None:
    for name in DOCUMENTED:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    objects = {id(_resolved(name)) for name in DOCUMENTED}
    missing = [
        name
        for name in importlib.import_module(module).__all__
        if f"{module}.{name}" not in IN_THE_TEXT
        and f"{module}.{name}" not in DOCUMENTED
        and id(_resolved(f"{module}.{name}")) not in objects
    ]
    assert missing == []


def _resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
