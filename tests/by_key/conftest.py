from __future__ import annotations

from tests.consumer.conftest import publisher, serve, store

__all__ = ["publisher", "serve", "store"]
