from __future__ import annotations

from tests.consumer.conftest import _one_tls_context

__all__ = ["_one_tls_context"]
