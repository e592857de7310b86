"""The connection to NATS. Only documented calls of nats-py are used here."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
import nats.errors
from nats.aio.client import Client

from feedapi_client.causes import network_problem
from feedapi_client.liftbridge.liftbridge_errors import BrokerUnavailableError, LiftbridgeError
from feedapi_client.protocol.text import printable
from feedapi_client.runtime.loop import beside

logger = logging.getLogger(__name__)

_sleep = asyncio.sleep
_CONNECTED_POLL = 0.02
_CLOSE_SECONDS = 1.0
_LONGEST_PAUSE = 30.0
"""Seconds between two log-ins that are refused: an outage is over at any moment, these are not."""
_REFUSAL = re.compile(r"authorization violation|authentication (?:expired|revoked)")
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"\s]+)\"")
_REFUSED = "the server refuses the user, the password or the token"
_NOT_TRUSTED = "the certificate of the server is not trusted"


async def connect(
    servers: str | Sequence[str],
    *,
    timeout: float,
    options: Mapping[str, Any],
    on_reconnect: Callable[[], Awaitable[None]],
    on_closed: Callable[[], Awaitable[None]],
) -> Client:
    """Connect to one of the servers. The client reconnects for ever."""
    urls = [servers] if isinstance(servers, str) else list(servers)
    _check_file(options.get("user_credentials"))
    places = ", ".join(map(_place, urls))
    problems = _Problems(len(urls), places)

    async def reconnected() -> None:
        problems.refusals = 0
        await on_reconnect()

    client, connected = Client(), False
    where = f"no connection to NATS at {places}"
    try:
        with anyio.move_on_after(timeout) as attempt:

            async def give_up() -> None:
                await problems.final.wait()
                attempt.cancel()

            # In a scope of anyio, which cancels again: nats-py may lose a cancellation, as
            # `asyncio.wait_for` does in Python 3.11.
            await beside(
                give_up,
                client.connect(
                    # Older versions of nats-py add a missing scheme or port to a string only.
                    servers if isinstance(servers, str) else urls,
                    error_cb=problems.note,
                    reconnected_cb=reconnected,
                    closed_cb=on_closed,
                    **{
                        "max_reconnect_attempts": -1,
                        "reconnect_time_wait": 0.1,
                        "name": "feedapi-client",
                        **_credentials(urls, options),
                        **options,
                    },
                ),
            )
            connected = True
            return client
        waited = "" if problems.final.is_set() else f" within {timeout:g} s"
        raise BrokerUnavailableError(f"{where}{waited}: {problems.text}")
    except ImportError as error:
        raise LiftbridgeError(
            f"credentials and seeds of NATS need the package {error.name}: "
            "pip install 'nats-py[nkeys]'"
        ) from error
    except (OSError, nats.errors.Error) as error:
        raise BrokerUnavailableError(f"{where}: {_text(error)}") from error
    finally:
        if not connected:
            # nats-py 2.16 leaves the socket of an attempt open that fails or is cancelled.
            with suppress(Exception), anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await client.close()


def _check_file(file: Any) -> None:
    """Raise `LiftbridgeError` for a file that nats-py 2.16 would try for ever, or read for ever."""
    if not isinstance(file, str | Path):
        return
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise LiftbridgeError(
            f"user_credentials (--nats-creds): {file}: {error.strerror}"
        ) from error
    if b"BEGIN NATS USER JWT" not in content or b"BEGIN USER NKEY SEED" not in content:
        raise LiftbridgeError(f"user_credentials (--nats-creds): {file} is no file of credentials")


def _credentials(urls: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return user and password, or the token, that all URLs share. nats-py does not decode them."""
    found = {url.rpartition("://")[2].rpartition("@")[0] for url in urls}
    user, colon, password = map(unquote, min(found, default="").partition(":"))
    if len(found) > 1 or not user or options.keys() & {"user", "password", "token"}:
        return {}
    return {"user": user, "password": password} if colon else {"token": user}


class _Problems:
    """What nats-py reports. `final` is set when all servers refuse the client."""

    def __init__(self, servers: int, places: str) -> None:
        self.places = places
        self.text = "no answer"
        self.final = asyncio.Event()
        self.refusals = 0
        self._servers = servers

    async def note(self, error: Exception) -> None:
        if self.text != _text(error):
            kind = type(error).__name__
            logger.warning("NATS at %s: %s", self.places, _text(error), extra={"error": kind})
        self.text = _text(error)
        if self.text in (_REFUSED, _NOT_TRUSTED):
            self.refusals += 1
            if self.refusals >= self._servers:
                self.final.set()
                await _sleep(min(_LONGEST_PAUSE, 2.0 ** min(9, self.refusals - self._servers)))


def _text(error: BaseException) -> str:
    """Return what an error says, in words of ours: its text may quote a server's URL."""
    said = str(error).lower()
    if denied := _DENIED.search(said):
        return f"the server refuses the {denied[1]} to {denied[2]}: no permission"
    if isinstance(error, nats.errors.AuthorizationError) or _REFUSAL.search(said):
        return _REFUSED
    if isinstance(error, ssl.SSLCertVerificationError):
        return _NOT_TRUSTED
    if isinstance(error, TimeoutError):
        return "no answer in time: is it a NATS server, and are the port and TLS right?"
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        # nats-py writes before it reads what the server said.
        return "the server closed the connection: its log says why, such as too many connections"
    if type(error) is nats.errors.Error:  # the words of the server, or of nats-py about any URL
        return printable(said.removeprefix("nats: ").strip("'"))
    return network_problem(error) or type(error).__name__


def cause(client: Client) -> str:
    """Return what the client reported last, to be put behind a message; nothing without."""
    return "" if client.last_error is None else f": {_text(client.last_error)}"


def denial(client: Client) -> str:
    """Return the permission that the server said last is missing; nothing without."""
    denied = _DENIED.search(_said(client))
    return f" NATS: no permission for the {denied[1]} to {denied[2]}." if denied else ""


def check_inbox(client: Client, inbox: str) -> None:
    """Raise an error when the server refuses the subscription to an inbox: no ack would come."""
    said = _said(client)
    if "maximum subscriptions" in said:  # the connection ends in a moment
        raise BrokerUnavailableError(f"NATS{cause(client)}")
    denied = _DENIED.search(said)
    if denied and denied[1] == "subscription" and denied[2].startswith(inbox.lower()):
        raise LiftbridgeError(
            f"the user may not subscribe to its inbox {inbox}, where acks come to: give it the "
            f"permission to subscribe to {inbox.rpartition('.')[0]}.>, or set an inbox that it may "
            "subscribe to, with options={'inbox_prefix': ...} of the publisher"
        )


def _said(client: Client) -> str:
    return str(client.last_error or "").lower()


async def wait_until_connected(client: Client, deadline: float) -> bool:
    """Wait until the client is connected; False when it is not at `deadline` (loop time).

    nats-py buffers what is published while it reconnects, without a deadline and up to a small
    limit. Messages wait here instead.
    """
    while not client.is_connected:
        if client.is_closed:
            raise BrokerUnavailableError(f"the connection to NATS is closed{cause(client)}")
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(_CONNECTED_POLL)
    return True


async def flush(client: Client) -> None:
    """Wait until the server has received all that was sent before.

    nats-py's own flush writes its PING ahead of the data that is still buffered, so only a second
    flush comes behind that data. Without the second one, a message can reach the server before the
    subscription that it is for.
    """
    await client.flush()
    await client.flush()


class MessageWriter:
    """Publishes the messages of one call; `batch_size` of them between looks at the connection."""

    batch_size = 1

    def __init__(self, client: Client) -> None:
        self._client = client

    async def add(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish a message, or keep it until `flush`. `reply` is where NATS replies to."""
        try:
            await self._client.publish(subject, data, reply=reply)
        except nats.errors.Error as error:
            raise unavailable(error, self._client) from error

    async def flush(self) -> None:
        """Publish the messages that were kept."""


def unavailable(error: Exception, client: Client) -> BrokerUnavailableError:
    """Translate an error of nats-py. Its text is left out, because it may quote a server's URL."""
    return BrokerUnavailableError(f"NATS: {type(error).__name__}{cause(client)}")


def _place(url: str) -> str:
    """Return host and port of a URL: what stands before the last @ may be a password."""
    return url.rpartition("@")[2].rpartition("://")[2].partition("/")[0] or "an empty URL"
