"""Credentials: `TokenFile` and `OAuthClientCredentials`, which change while a consumer runs, and
certificates.
"""

from __future__ import annotations

import errno
import json
import math
import os
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import anyio
import httpx

from feedapi_client.arguments import check_plain, check_seconds
from feedapi_client.errors import AuthenticationError, FeedUnavailableError
from feedapi_client.http.io import BlockingBody, HTTPXBody, basic, run_now

# The codes of RFC 6749, section 5.2. Any other text may be an echo of the secret.
_ERRORS = (
    *("invalid_request", "invalid_client", "invalid_grant", "unauthorized_client"),
    *("unsupported_grant_type", "invalid_scope"),
)
_MAX_TOKEN = 64 * 1024  # bytes of a token file, and of a token endpoint's answer
_UNAUTHORIZED = 401
_REFUSED = (401, 403)


class TokenFile(httpx.Auth):
    """Sends the token in a file, which is read with each request.

    ::

        http = httpx.AsyncClient(auth=TokenFile("/var/run/secrets/feed/token"))
        async with FeedConsumer(url, http=http, store=store) as consumer: ...

    For tokens that something else renews: Kubernetes' projected service account tokens, a Vault
    agent, a cron job. A request that gets status 401 or 403 is repeated once if the file has
    another token by then.

    Arguments:
        path: the file. White space around the token is ignored.
        scheme: what stands in front of the token; None for a file with a whole header value.
        header: the header that it is sent in.

    Raises `AuthenticationError` from a request if there is no token that can be sent.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        scheme: str | None = "Bearer",
        header: str = "Authorization",
    ) -> None:
        check_plain("scheme", scheme, "str", optional=True)
        check_plain("header", header, "str")
        self._path = Path(path)
        self._scheme = scheme
        self._header = header

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        value = request.headers[self._header] = self._value()
        response = yield request
        if response.status_code in _REFUSED and (now := self._value()) != value:
            request.headers[self._header] = now
            yield request

    def _value(self) -> str:
        try:
            if not self._path.is_file():  # to open a FIFO waits for its other end
                raise OSError(errno.EINVAL, "there is no regular file")
            with self._path.open("rb") as file:
                token = file.read(_MAX_TOKEN).decode("ascii").strip()
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise AuthenticationError(
                f"the token file {self._path} can't be read: {reason}"
            ) from None
        if not token or not token.isprintable():
            raise AuthenticationError(f"the token file {self._path} holds no token, on one line")
        return token if self._scheme is None else f"{self._scheme} {token}"


class OAuthClientCredentials(httpx.Auth):
    """Gets tokens by OAuth 2.0's client credentials (RFC 6749, section 4.4), and renews them.

    ::

        auth = OAuthClientCredentials(
            "https://login.example/oauth2/token",
            client_id="orders", client_secret=os.environ["SECRET"], scope="feed.read",
        )
        http = httpx.AsyncClient(auth=auth)

    A token is got with the first request, and again `leeway` seconds before it expires or when a
    request gets status 401, by one request at a time. The token endpoint is asked through the same
    client, with its certificates and proxies.

    Arguments:
        token_url: the token endpoint.
        client_id, client_secret: of this application. A function is called for the secret each time
            that a token is got, for a secret that rotates.
        scope: what to ask for.
        extra: more fields for the endpoint, such as ``{"audience": "..."}``.
        in_body: send the credentials in the body, for endpoints that don't take basic
            authentication.
        leeway: seconds.

    Concurrency: one object may serve any number of clients, in one event loop or several threads.

    Raises `AuthenticationError` from a request if the endpoint refuses, and `FeedUnavailableError`
    if it fails, which is retried (R14).
    """

    def __init__(
        self,
        token_url: str,
        *,
        client_id: str,
        client_secret: str | Callable[[], str],
        scope: str | None = None,
        extra: dict[str, str] | None = None,
        in_body: bool = False,
        leeway: float = 60.0,
    ) -> None:
        check_plain("token_url", token_url, "str")
        check_plain("client_id", client_id, "str")
        if not callable(client_secret):
            check_plain("client_secret", client_secret, "str")
        check_plain("scope", scope, "str", optional=True)
        check_seconds("leeway", leeway, optional=False)
        self._url = token_url
        self._shown = token_url.partition("?")[0].rpartition("@")[2]
        self._client_id = client_id
        self._client_secret = client_secret
        self._fields = {"grant_type": "client_credentials", **(extra or {})}
        if scope is not None:
            self._fields["scope"] = scope
        self._in_body = in_body
        self._leeway = leeway
        self._token = ""
        self._until = 0.0
        self._lock = anyio.Lock()
        self._thread_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"OAuthClientCredentials({self._shown!r})"

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = ""
        for _ in range(2):
            async with self._lock:
                if self._needs_token(token):
                    answer = yield self._request(request)
                    await self._take(answer, HTTPXBody(answer))
                token = self._token
            request.headers["Authorization"] = f"Bearer {token}"
            if (yield request).status_code != _UNAUTHORIZED:
                return

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        token = ""
        for _ in range(2):
            with self._thread_lock:
                if self._needs_token(token):
                    answer = yield self._request(request)
                    run_now(self._take(answer, BlockingBody(answer)))
                token = self._token
            request.headers["Authorization"] = f"Bearer {token}"
            if (yield request).status_code != _UNAUTHORIZED:
                return

    def _needs_token(self, refused: str) -> bool:
        return self._token in ("", refused) or time.monotonic() >= self._until

    def _request(self, request: httpx.Request) -> httpx.Request:
        secret = self._client_secret
        secret = secret() if callable(secret) else secret
        fields = dict(self._fields)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._in_body:
            fields |= {"client_id": self._client_id, "client_secret": secret}
        else:
            # RFC 6749, 2.3.1: both are form-encoded before they are joined.
            headers["Authorization"] = basic(quote_plus(self._client_id), quote_plus(secret))
        timeout = {k: v for k, v in request.extensions.items() if k == "timeout"}
        return httpx.Request("POST", self._url, data=fields, headers=headers, extensions=timeout)

    async def _take(self, response: httpx.Response, answer: HTTPXBody) -> None:
        """Keep the token of an answer. Raises what its status means. No more of it is read than a
        token may take, and its coding is not undone.
        """
        body, status = bytearray(), answer.status
        try:
            if answer.coding.lower() not in ("", "identity"):
                raise self._no_token("compressed, which was not asked for")
            while (chunk := await answer.read()) is not None:
                body += chunk
                if len(body) > _MAX_TOKEN:
                    raise self._no_token("too long")
        finally:
            await answer.aclose()
        # httpx reads each response of an auth, too.
        response.stream = httpx.ByteStream(bytes(body))
        response.is_closed = response.is_stream_consumed = False
        if status == 429 or status >= 500:
            raise FeedUnavailableError(
                f"the token endpoint {self._shown} answered with status {status}", status=status
            )
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(body)
        found = found if isinstance(found, dict) else {}
        token, kind = found.get("access_token"), str(found.get("token_type", "bearer"))
        if not 200 <= status < 300 or not isinstance(token, str) or kind.lower() != "bearer":
            reasons = [f", {code}" for code in _ERRORS if found.get("error") == code]
            raise self._no_token("".join((f"status {status}", *reasons)))
        if not token.isascii() or not token.isprintable():
            raise self._no_token("one that can't be sent")
        seconds = math.inf  # until a request is refused
        with suppress(TypeError, ValueError, OverflowError):
            seconds = float(found.get("expires_in"))
        self._token = token
        self._until = time.monotonic() + max(seconds - self._leeway, seconds / 2)

    def _no_token(self, why: str) -> AuthenticationError:
        return AuthenticationError(f"the token endpoint {self._shown} gave no token: {why}")


def showing(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Let the clients of a context show a certificate, for mutual TLS. Raises ValueError when the
    files hold no certificate and its key that can be read.
    """
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError):
        files = cert if key is None else f"{cert} and {key}"
        raise ValueError(
            f"{files}: no certificate with its key, without a password, can be read from there"
        ) from None


def _no_password() -> str:
    raise ValueError("the key needs a password")


def trusted(ca_file: str) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a file only, for `verify` of httpx. Raises
    ValueError when the file holds no certificates that can be read.
    """
    if not ca_file:  # would be the public ones
        raise ValueError("the name of the file is empty")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else ""
        raise ValueError(
            f"{ca_file} holds no certificates that can be read{f' ({reason})' if reason else ''}"
        ) from None
