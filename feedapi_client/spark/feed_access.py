"""How one process reaches a feed: HTTP clients, credentials, the last discovery. Imports no Spark.

Python workers outlive a task. The next task finds connections open and certificates loaded.

Credentials come from the environment of the process that sends the request, or from a function of
the user. They are never in the value of an option, which would show in query plans.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import httpx

from feedapi_client.arguments import environment_value, import_function
from feedapi_client.client import SyncFeedClient
from feedapi_client.errors import AuthenticationError, FeedError
from feedapi_client.http.auth import trusted
from feedapi_client.http.io import AsyncIO, BlockingIO
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.protocol.dialects import check_options
from feedapi_client.spark.source_options import OptionError, SourceOptions

_NOT_SENDABLE = (
    "the credentials of authEnv, authCallable or headerEnv.NAME can't be sent: they must be "
    "printable ASCII text, and a function must return a str, a mapping of headers or an httpx.Auth"
)

# ---------------------------------------------------------------------- credentials


class Credentials(httpx.Auth):
    """What options authEnv, headerEnv.NAME and authCallable send with each request."""

    def __init__(self, options: SourceOptions) -> None:
        self._fixed = {
            header: _of_environment(variable, f"headerEnv.{header}")
            for header, variable in options.header_env.items()
        }
        if options.auth_env is not None:
            token = _of_environment(options.auth_env, "authEnv")
            self._fixed["Authorization"] = _with_scheme(token)
        self._function: Callable[[], Any] | None = None
        self._given: Any = {}
        if options.auth_callable is not None:
            self._function = _imported(options.auth_callable)
            self._given = self._function()
        try:
            httpx.Headers({**options.headers, **self._fixed, **_headers_of(self._given)})
        except (TypeError, ValueError):
            # The text of the error, and the chained error itself, would quote the value.
            raise OptionError(f"feedapi source: {_NOT_SENDABLE}") from None

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers.update(self._fixed)
        if isinstance(self._given, httpx.Auth):
            return self._given.sync_auth_flow(request)
        return super().sync_auth_flow(request)

    def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        request.headers.update(self._fixed)
        if isinstance(self._given, httpx.Auth):
            return self._given.async_auth_flow(request)
        return super().async_auth_flow(request)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers.update({**self._fixed, **_headers_of(self._given)})
        response = yield request
        if self._function is None or response.status_code not in (401, 403):
            return
        self._given = self._function()
        try:
            fresh = httpx.Headers(_headers_of(self._given))
        except (TypeError, ValueError):
            raise AuthenticationError(_NOT_SENDABLE) from None
        if any(request.headers.get(name) != value for name, value in fresh.items()):
            request.headers.update(fresh)
            yield request


def _headers_of(given: object) -> dict[str, str]:
    if isinstance(given, httpx.Auth):
        return {}
    if isinstance(given, Mapping):
        return {str(name): str(value) for name, value in given.items()}
    if isinstance(given, str):
        return {"Authorization": _with_scheme(given)}
    raise TypeError("a function returned something else")


def _of_environment(variable: str, option: str) -> str:
    try:
        return environment_value(variable, f"option {option}")
    except ValueError as error:
        raise OptionError(
            f"feedapi source: {error}. The variable is needed by the driver and by the executors "
            "(spark.executorEnv.NAME)"
        ) from None


def _with_scheme(value: str) -> str:
    return value if " " in value.strip() else f"Bearer {value.strip()}"


def _imported(path: str) -> Callable[..., Any]:
    try:
        return import_function(path, "option authCallable")
    except ValueError as error:
        raise OptionError(
            f"feedapi source: {error}. It must be importable on the driver and on every executor"
        ) from None


# ---------------------------------------------------------------------- clients


class SharedClient:
    """An `httpx.Client`, which is closed when nobody holds this object any more."""

    def __init__(self, io: BlockingIO) -> None:
        self.http: Any = io.client
        weakref.finalize(self, io.client.close).atexit = False


@lru_cache(8)
def kept_client(
    url: str, limits: Limits, ca_file: str | None, _headers_and_credentials: Any
) -> SharedClient:
    return SharedClient(BlockingIO(url, limits=limits, verify=_trusted(ca_file)))


def _trusted(ca_file: str | None) -> ssl.SSLContext | None:
    try:
        return None if ca_file is None else trusted(ca_file)
    except ValueError as error:
        raise OptionError(f"feedapi source: option caFile: {error}") from None


def client_of_event_loop(options: SourceOptions) -> httpx.AsyncClient | None:
    """None where the options ask for nothing of their own: connections of ours cost less."""
    own = options.headers, options.header_env, options.auth_env, options.auth_callable
    if not any((*own, options.ca_file)):
        return None
    made = AsyncIO(options.url, limits=options.limits, verify=_trusted(options.ca_file)).client
    made.headers.update(options.headers)
    made.auth = Credentials(options)
    return made  # type: ignore[no-any-return]


_lock = threading.Lock()


def _client_of(options: SourceOptions) -> SharedClient:
    credentials = Credentials(options)
    headers = (tuple(sorted(each.items())) for each in (options.headers, options.header_env))
    key = (options.auth_env, options.auth_callable, *headers)
    with _lock:
        client = kept_client(options.url, options.limits, options.ca_file, key)
    client.http.headers.update(options.headers)
    client.http.auth = credentials
    return client


# ---------------------------------------------------------------------- the feed


class FeedConnection:
    """Client, last discovery and fetch options, or what the driver resolved. Thread-safe."""

    def __init__(
        self,
        options: SourceOptions,
        fetch: FetchOptions | None = None,
        info: FeedInfo | None = None,
    ) -> None:
        self.options = options
        self._lock = threading.Lock()
        self.began = time.monotonic()
        """When this process first heard of the feed's closed partitions."""
        self.failed_at = -math.inf
        """When a read or a discovery of this process failed last (R6)."""
        self._info = info
        self._shared = _client_of(options)
        self._resolved = fetch is not None
        self.client = self._client(fetch or replace(options.fetch, filters={}))

    @property
    def url(self) -> str:
        return self.client.feed

    @property
    def info(self) -> FeedInfo:
        return self._info or self.discover()

    @property
    def fetch_options(self) -> FetchOptions:
        if not self._resolved:
            self.discover()
        return self.client.options

    def discover(self, seen: FeedInfo | None = None) -> FeedInfo:
        """Discover, unless another thread did so since the caller got `seen`."""
        with self._lock:
            if seen is not None and self._info is not seen and self._info is not None:
                return self._info
            try:
                info = self.client.discover()
            except FeedError:
                self.failed_at = time.monotonic()
                raise
            self._resolve(info)
            self._info = info
            return info

    def restore(self, info: FeedInfo) -> None:
        """Take the last discovery of an earlier driver: the feed need not answer for that."""
        if self._resolved:
            return  # and a discovery in the background may hold the lock for long
        with self._lock:
            self._resolve(info)

    def _resolve(self, info: FeedInfo) -> None:
        if self._resolved:
            return
        filters = _resolve_filters(self.options.filters, info)
        fetch = replace(self.options.fetch, filters=filters)
        check_options(info, fetch, feed=self.url)
        self._info = info
        self.client, self._resolved = self._client(fetch), True

    def _client(self, fetch: FetchOptions) -> SyncFeedClient:
        options = self.options
        client = SyncFeedClient(
            options.url,
            http=self._shared.http,
            fetch=fetch,
            limits=options.limits,
            retry=options.retry,
            v1_partitions=options.v1_partitions,
            any_payload=True,
        )
        client.info = self._info  # an outage from here on is not a wrong URL
        return client


def _resolve_filters(wanted: Mapping[str, str], info: FeedInfo) -> dict[str, str]:
    """Return the filters under the names of the feed: Spark changes option names to lower case."""
    resolved = {}
    for name, value in wanted.items():
        matches = [offered for offered in info.filters if offered.lower() == name.lower()]
        if len(matches) > 1:
            raise OptionError(
                f"feedapi source: option filter.{name} matches several filters of the feed: "
                f"{', '.join(matches)}"
            )
        resolved[matches[0] if matches else name] = value
    return resolved
