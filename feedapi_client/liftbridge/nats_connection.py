"""The connection to NATS. Only documented calls of nats-py are used here."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
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
_SILENT_SECONDS = 1.0
"""Seconds of waiting for a connection after which it is told."""
_LONGEST_PAUSE = 30.0
"""Seconds between two log-ins that are refused: an outage is over at any moment, these are not."""
_REFUSAL = re.compile(r"authorization violation|authentication (?:expired|revoked)")
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"\s]+)\"")


async def connect(
    servers: str | Sequence[str],
    *,
    timeout: float,
    options: Mapping[str, Any],
    on_error: Callable[[Exception], object],
    on_reconnect: Callable[[], Awaitable[None]],
    on_closed: Callable[[], Awaitable[None]],
) -> Client:
    """Connect to one of the servers. The client reconnects for ever.

    Raises:
        BrokerUnavailableError: no server could be reached within `timeout` seconds, or one refuses
            the credentials, or its certificate is not trusted.
        LiftbridgeError: the credentials need a package that is not installed, or their file can't
            be read, or is none.
    """
    urls = [servers] if isinstance(servers, str) else list(servers)
    _check_files(options.get("user_credentials"))
    problems = _Problems(len(urls), on_error)

    async def reconnected() -> None:
        problems.refusals = 0
        await on_reconnect()

    client, connected = Client(), False
    places = ", ".join(map(_place, urls))
    where = f"no connection to NATS at {places}"
    try:
        with anyio.move_on_after(timeout) as attempt:

            async def give_up() -> None:
                with anyio.move_on_after(_SILENT_SECONDS) as silent:
                    await problems.final.wait()
                if silent.cancelled_caught:
                    logger.warning("waiting for NATS at %s, at most %g s", places, timeout)
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


def _check_files(credentials: Any) -> None:
    """Raise `LiftbridgeError` for a file that nats-py 2.16 would try for ever, or read for ever."""
    files = credentials if isinstance(credentials, tuple) else [credentials]
    for file in files:
        if not isinstance(file, str | Path):
            continue
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise LiftbridgeError(
                f"user_credentials (--nats-creds): {file}: {error.strerror}"
            ) from error
        for part in (b"NATS USER JWT", b"USER NKEY SEED") if file is credentials else ():
            if b"BEGIN " + part not in content:
                raise LiftbridgeError(
                    f"user_credentials (--nats-creds): {file} is no file of credentials: it has no "
                    f"line BEGIN {part.decode()}"
                )


def _credentials(urls: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return user and password, or the token, that all URLs share. nats-py does not decode them."""
    found = {url.rpartition("://")[2].rpartition("@")[0] for url in urls}
    user, colon, password = map(unquote, min(found, default="").partition(":"))
    if len(found) > 1 or not user or options.keys() & {"user", "password", "token"}:
        return {}
    return {"user": user, "password": password} if colon else {"token": user}


class _Problems:
    """What nats-py reports, while it connects and later.

    Arguments:
        servers: number of servers, each of which is asked in turn.
        on_error: called with each problem.

    Attributes:
        text: the last problem.
        final: set when no further attempt to connect can succeed.
        refusals: since the client was connected last.
    """

    def __init__(self, servers: int, on_error: Callable[[Exception], object]) -> None:
        self.text = "no answer"  # the same one is told once
        self.final = asyncio.Event()
        self._servers = servers
        self._on_error = on_error
        self._in_row = 0
        self.refusals = 0

    async def note(self, error: Exception) -> None:
        """Take note of a problem. nats-py waits for it before it goes on."""
        self._on_error(error)
        # Without the error's text, which may quote a server's URL.
        kind = type(error).__name__
        logger.info("NATS reported %s", kind, extra={"error": kind})
        if self.text != _text(error):
            logger.warning("NATS: %s", _text(error), extra={"error": kind})
        self.text = _text(error)
        if self.text not in (_REFUSED, _NOT_TRUSTED):
            self._in_row = 0
            return
        self._in_row += 1
        self.refusals += 1
        if self._in_row >= self._servers:
            self.final.set()
        if self.refusals >= self._servers:  # whatever the other servers say
            await _sleep(min(_LONGEST_PAUSE, 2.0 ** min(9, self.refusals - self._servers)))


_REFUSED = "the server refuses the user, the password or the token"
_NOT_TRUSTED = "the certificate of the server is not trusted"


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


def check_inbox(client: Client, inbox: str) -> None:
    """Raise `LiftbridgeError` when the server refuses the subscription to an inbox."""
    if "maximum subscriptions" in str(client.last_error).lower():  # the connection ends in a moment
        raise BrokerUnavailableError(f"NATS{cause(client)}")
    denied = denied_subject(client.last_error, "subscription")
    if denied and denied.startswith(inbox.lower()):
        raise LiftbridgeError(
            f"the user may not subscribe to its inbox {inbox}, where acks come to: give it the "
            f"permission to subscribe to {inbox_subjects(inbox)}, or set an inbox that it may "
            "subscribe to, with options={'inbox_prefix': ...} of the publisher"
        )


def inbox_subjects(inbox: str) -> str:
    """Return the subjects of all inboxes with the same prefix, as a permission names them."""
    return f"{inbox.rpartition('.')[0]}.>"


def denied_subject(error: Exception | None, what: Literal["publish", "subscription"]) -> str:
    """Return the subject that a permission is missing for, in small letters; else nothing."""
    found = _DENIED.search(str(error or "").lower())
    return found[2] if found is not None and found[1] == what else ""


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

    async def add(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish a message, or keep it until `flush`. `reply` is where NATS replies to.

        Raises:
            BrokerUnavailableError: nats-py refused it.
            ValueError: the subject is not valid.
        """
        try:
            await self._client.publish(subject, data, reply=reply)
        except nats.errors.BadSubjectError as error:
            raise ValueError(f"{subject!r} is no NATS subject") from error
        except nats.errors.Error as error:
            raise unavailable(error, self._client) from error

    async def flush(self) -> None:
        """Publish the messages that were kept. Raises `BrokerUnavailableError`."""


def unavailable(error: Exception, client: Client) -> BrokerUnavailableError:
    """Translate an error of nats-py. Its text is left out, because it may quote a server's URL."""
    return BrokerUnavailableError(f"NATS: {type(error).__name__}{cause(client)}")


def _place(url: str) -> str:
    """Return host and port of a URL: what stands before the last @ may be a password."""
    return url.rpartition("@")[2].rpartition("://")[2].partition("/")[0] or "an empty URL"
