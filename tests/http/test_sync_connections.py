"""The synchronous transport with large reads."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx
import pytest

from feedapi_client import NegotiationError, SyncFeedClient
from feedapi_client.http.connections import LargeReadsTransport

BODY = b"x" * 150_000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve one connection that answers one request, and give the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        thread.join()


def a_client(kib: int) -> httpx.Client:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.Client(
        transport=LargeReadsTransport(context, httpx.Limits(), read_bytes=kib * 1024)
    )


@pytest.mark.parametrize("kib", [64, 256])
def test_a_read_asks_for_as_much_as_was_set(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    connect = httpcore.SyncBackend.connect_tcp

    def connect_noting(*args: Any, **options: Any) -> httpcore.NetworkStream:
        stream = connect(*args, **options)
        read = stream.read

        def read_noting(max_bytes: int, timeout: float | None = None) -> bytes:
            asked.append(max_bytes)
            return read(max_bytes, timeout)

        monkeypatch.setattr(stream, "read", read_noting)
        return stream

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect_noting)
    with (
        answering(ANSWER) as url,
        a_client(kib) as client,
        client.stream("GET", url) as response,
    ):
        assert sum(len(chunk) for chunk in response.iter_raw()) == len(BODY)
    assert set(asked) == {kib * 1024}


def test_a_body_that_breaks_off_is_an_error_of_httpx() -> None:
    with (
        answering(ANSWER[:-1]) as url,
        a_client(64) as client,
        pytest.raises(httpx.RemoteProtocolError, match="without sending complete message"),
    ):
        client.get(url)


def test_a_refused_connection_is_an_error_of_httpx() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    with a_client(64) as client, pytest.raises(httpx.ConnectError):
        client.get(url)


def test_a_mock_of_httpx_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def mocked(_: object, request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, text="mocked", request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", mocked)
    with (
        SyncFeedClient("http://service.invalid/feed") as client,
        pytest.raises(NegotiationError, match="mocked"),
    ):
        client.discover()
