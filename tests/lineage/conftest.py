"""Revisions are counted in these tests, so that they can say which positions are saved."""

from __future__ import annotations

import pytest

from feedapi_client import model


@pytest.fixture(autouse=True)
def _counted_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "draw_step", lambda: 1)
