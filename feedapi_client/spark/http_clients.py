"""The HTTP clients of this process, and the credentials of their requests. Imports no Spark.

Python workers outlive a task. The next task finds connections open and certificates loaded.

Credentials come from the environment of the process that sends the request, or from a function of
the user. They are never in the value of an option, which would show in query plans.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Any

import httpx

from feedapi_client.arguments import environment_value, import_function
from feedapi_client.errors import AuthenticationError
from feedapi_client.http.auth import trusted
from feedapi_client.http.io import BlockingIO
from feedapi_client.options import Limits
from feedapi_client.spark.source_options import OptionError, SourceOptions

_CAPACITY = 32
_NOT_SENDABLE = (
    "the credentials of authEnv, authCallable or headerEnv.NAME can't be sent: they must be "
    "printable ASCII text, and a function must return a str, a mapping of headers or an httpx.Auth"
)


class SharedClient:
    """An `httpx.Client` that is shared by all who read with equal options.

    It is closed when nobody holds this object any more.
    """

    def __init__(self, io: BlockingIO) -> None:
        self.http: Any = io.client
        weakref.finalize(self, io.client.close).atexit = False


def shared_client(options: SourceOptions) -> SharedClient:
    """Return the client for such options, with fresh credentials. Thread-safe.

    The last `_CAPACITY` clients are kept for later, also while nobody uses them.

    Raises:
        OptionError: the credentials are not available in this process.
    """
    headers = (tuple(sorted(each.items())) for each in (options.headers, options.header_env))
    credentials = (options.auth_env, options.auth_callable, *headers)
    with _lock:
        client = kept_client(options.url, options.limits, options.ca_file, credentials)
    authorize(client.http, options)
    return client


_lock = threading.Lock()


@lru_cache(_CAPACITY)
def kept_client(url: str, limits: Limits, ca_file: str | None, _credentials: Any) -> SharedClient:
    """Return the client of this process for these options; those used last are kept.

    Raises `OptionError` where this process has no such file.
    """
    try:
        verify = None if ca_file is None else trusted(ca_file)
    except ValueError as error:
        raise OptionError(f"feedapi source: option caFile: {error}") from None
    return SharedClient(BlockingIO(url, limits=limits, verify=verify))


def authorize(http: Any, options: SourceOptions) -> None:
    """Set the headers and credentials that the options name on an `httpx.Client`.

    Raises `OptionError` where they can't be had here, or not be sent. It never holds a value.
    """
    headers = dict(options.headers)
    for header, variable in options.header_env.items():
        headers[header] = _environment(variable, f"headerEnv.{header}")
    auth: Any = None
    if options.auth_env is not None:
        headers["Authorization"] = _with_scheme(_environment(options.auth_env, "authEnv"))
    if options.auth_callable is not None:
        function = _imported(options.auth_callable)
        given = function()
        headers |= _headers_of(given)
        auth = _Renewed(http, function) if isinstance(given, str | Mapping) else given
    try:
        http.headers.update(headers)
        http.auth = auth
    except (TypeError, ValueError):
        # The text of the error, and the chained error itself, would quote the value.
        raise OptionError(f"feedapi source: {_NOT_SENDABLE}") from None


class _Renewed(httpx.Auth):
    """Calls the function again when what it returned is refused: a query outlives its tokens."""

    def __init__(self, http: Any, function: Callable[[], Any]) -> None:
        self._http = http
        self._function = function

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield request
        if response.status_code not in (401, 403):
            return
        fresh = _headers_of(self._function())
        if any(request.headers.get(name) != value for name, value in fresh.items()):
            try:
                request.headers.update(fresh)
            except (TypeError, ValueError):  # its text would quote the value
                raise AuthenticationError(_NOT_SENDABLE) from None
            self._http.headers.update(fresh)
            yield request


def _headers_of(given: object) -> dict[str, str]:
    """Return the headers that a function has returned, none for an `httpx.Auth`."""
    if isinstance(given, str):
        return {"Authorization": _with_scheme(given)}
    if isinstance(given, Mapping):
        return {str(name): str(value) for name, value in given.items()}
    return {}


def _environment(variable: str, option: str) -> str:
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
