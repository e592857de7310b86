"""The URL of a stream that holds the positions of a relay: ``liftbridge://HOST:PORT/STREAM``.

Host and port are those of a broker's gRPC API; several are separated by commas. ``liftbridges://``
is the same over TLS. The query may hold ``partition``, ``replicas`` (of a new stream), ``ca``,
``cert`` and ``cert_key`` (files), and ``token_env`` (the environment variable with a token).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import grpc

from feedapi_client.arguments import environment_value
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.stream_model import Stream
from feedapi_client.liftbridge.stream_store import StreamCursorStore

# Messages leave out what looks like a URL: it may hold a password.
_FORM = "a URL with the scheme liftbridge, HOST:PORT of a broker's gRPC API, and /STREAM"
_OPTIONS = {"partition", "replicas", "ca", "cert", "cert_key", "token_env"}
_SECONDS = 30.0
"""Seconds for which an operator's command waits for the broker."""


def open_ledger(
    url: str, *, create: bool = False
) -> AbstractAsyncContextManager[StreamCursorStore]:
    """Return the store that a URL names, to be opened; with `create` a missing stream is created.

    Raises:
        ValueError: it is no such URL, or a file or a variable that it names is missing. The text
            quotes nothing of the URL.
    """
    parts = urlsplit(url)
    brokers = tuple(each for each in parts.netloc.split(",") if each)
    name = unquote(parts.path.lstrip("/"))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    partition, replicas = options.get("partition", "0"), options.get("replicas", "1")
    numbers = partition.isdecimal() and replicas.isdecimal()
    if not brokers or not name or not numbers or "@" in parts.netloc:
        raise ValueError(f"the positions of a relay are at {_FORM}")
    if unknown := sorted(options.keys() - _OPTIONS):
        raise ValueError(f"{', '.join(map(repr, unknown))} is no option of {_FORM}")
    credentials = token = None
    if parts.scheme == "liftbridges":
        credentials = grpc.ssl_channel_credentials(
            *(content_of(options.get(file)) for file in ("ca", "cert_key", "cert"))
        )
        if (variable := options.get("token_env")) is not None:
            token = environment_value(variable, "token_env")
    elif options.keys() - {"partition", "replicas"}:
        raise ValueError("certificates and tokens need the scheme liftbridges")
    stream = Stream(name, partitions=int(partition) + 1)
    api = LiftbridgeApi(brokers, timeout=_SECONDS, credentials=credentials, token=token)
    return _open(api, stream, int(partition), int(replicas) if create else 0)


@asynccontextmanager
async def _open(
    api: LiftbridgeApi, stream: Stream, partition: int, new_replicas: int
) -> AsyncIterator[StreamCursorStore]:
    async with api:
        if new_replicas:
            await api.create_stream(
                stream, concurrency_control=True, replication_factor=new_replicas
            )
        yield StreamCursorStore(
            None, api, stream, partition=partition, give_up_after=_SECONDS, look_only=True
        )


def content_of(file: str | None) -> bytes | None:
    """Return what is in a certificate or key file. Raises ValueError: it can't be read."""
    try:
        return None if file is None else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
