"""The event loops that a simulation runs on. The quick answer leaves trio out."""

from __future__ import annotations

import pytest

BACKENDS = ("asyncio", pytest.param("trio", marks=pytest.mark.slow))
