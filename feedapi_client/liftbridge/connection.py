"""The connection to NATS. Only documented calls of nats-py are used here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from feedapi_client.liftbridge.errors import BrokerUnavailableError

logger = logging.getLogger(__name__)

_CONNECTED_POLL = 0.02


async def connect(
    servers: str | Sequence[str],
    *,
    timeout: float,
    options: Mapping[str, Any],
    on_reconnect: Callable[[], Awaitable[None]],
    on_closed: Callable[[], Awaitable[None]],
) -> Client:
    """Connect to one of the servers. The client reconnects for ever.

    Raises:
        BrokerUnavailableError: no server could be reached within `timeout` seconds.
    """
    urls = [servers] if isinstance(servers, str) else list(servers)
    try:
        async with asyncio.timeout(timeout):
            return await nats.connect(
                # Older versions of nats-py add a missing scheme or port to a string only.
                servers if isinstance(servers, str) else urls,
                error_cb=_log_error,
                reconnected_cb=on_reconnect,
                closed_cb=on_closed,
                **{
                    "max_reconnect_attempts": -1,
                    "reconnect_time_wait": 0.1,
                    "name": "feedapi-client",
                    **options,
                },
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        raise BrokerUnavailableError(
            f"no connection to NATS at {', '.join(map(_place, urls))} within {timeout:g} s: "
            f"{type(error).__name__}"
        ) from error


async def wait_until_connected(client: Client, deadline: float) -> bool:
    """Wait until the client is connected; False when it is not at `deadline` (loop time).

    nats-py buffers what is published while it reconnects, without a deadline and up to a small
    limit. Messages wait here instead.

    Raises:
        BrokerUnavailableError: the client is closed.
    """
    # A poll, because the callbacks of a client that the caller connected belong to the caller.
    while not client.is_connected:
        if client.is_closed:
            raise BrokerUnavailableError("the connection to NATS is closed")
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(_CONNECTED_POLL)
    return True


async def flush(client: Client) -> None:
    """Wait until the server has received all that was sent before.

    nats-py's own flush writes its PING ahead of the data that is still buffered, so only a second
    flush comes behind that data. Without the second one, a message can reach the server before the
    subscription that it is for.

    Raises:
        nats.errors.Error: as nats-py's flush.
    """
    await client.flush()
    await client.flush()


class MessageWriter:
    """Publishes the messages of one call, one by one.

    `batch_size` is the number of messages to add before the connection is checked again.
    """

    batch_size = 1

    def __init__(self, client: Client) -> None:
        self._client = client

    async def add(self, subject: str, data: bytes) -> None:
        """Publish a message, or keep it until `flush`.

        Raises:
            BrokerUnavailableError: nats-py refused it.
            ValueError: the subject is not valid.
        """
        try:
            await self._client.publish(subject, data)
        except nats.errors.BadSubjectError as error:
            raise ValueError(f"{subject!r} is no NATS subject") from error
        except nats.errors.Error as error:
            raise unavailable(error) from error

    async def flush(self) -> None:
        """Publish the messages that were kept. Raises `BrokerUnavailableError`."""


def unavailable(error: Exception) -> BrokerUnavailableError:
    """Translate an error of nats-py. Its text is left out, because it may quote a server's URL."""
    return BrokerUnavailableError(f"NATS: {type(error).__name__}")


def _place(url: str) -> str:
    """Return host and port of a URL: what stands before the last @ may be a password."""
    return url.rpartition("@")[2].rpartition("://")[2].partition("/")[0]


async def _log_error(error: Exception) -> None:
    # Without the error's text, which may quote a server's URL.
    kind = type(error).__name__
    logger.info("NATS reported %s", kind, extra={"error": kind})
