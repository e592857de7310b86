"""Graceful restarts only: nothing is handled twice, also without any transaction."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.sharing.in_memory import restart_in_memory


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_graceful_restarts_in_memory_repeat_nothing(
    backend: Literal["asyncio", "trio"],
) -> None:
    outcome = restart_in_memory(12, seed=1, backend=backend)
    assert outcome.exactly_once, outcome
    assert outcome.splits
