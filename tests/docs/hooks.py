"""The hooks of the documentation, which MkDocs loads by path, as a module for tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.docs.snippets import ROOT


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("feedapi_docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


hooks = _load()
