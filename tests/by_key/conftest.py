from __future__ import annotations

from tests.consumer.conftest import _one_tls_context, publisher, serve, store

__all__ = ["_one_tls_context", "publisher", "serve", "store"]
