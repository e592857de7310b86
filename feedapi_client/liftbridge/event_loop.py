"""Which event loops Liftbridge can be used on."""

from __future__ import annotations

import asyncio

from feedapi_client.liftbridge.errors import LiftbridgeError


def require_asyncio() -> None:
    """Raise `LiftbridgeError` when the caller runs on another event loop than asyncio's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise LiftbridgeError(
            "Liftbridge needs asyncio, because nats-py and grpc.aio do not run on trio"
        ) from error
