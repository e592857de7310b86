"""Credentials of requests.

They come from the environment of the process that sends the request, or from a function of the
user. They are never in the value of an option, which would show in query plans.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from feedapi_client.spark.options import OptionError, SourceOptions


def authorize(http: Any, options: SourceOptions) -> None:
    """Set the headers and credentials that the options name on an `httpx.Client`.

    Raises:
        OptionError: an environment variable is not set in this process, the function can't be
            imported, or what it returns can't be sent. The message never holds a value.
    """
    headers = dict(options.headers)
    for header, variable in options.header_env.items():
        headers[header] = _environment(variable, f"headerEnv.{header}")
    auth: Any = None
    if options.auth_env is not None:
        headers["Authorization"] = _with_scheme(_environment(options.auth_env, "authEnv"))
    if options.auth_callable is not None:
        given = _call(options.auth_callable)
        if isinstance(given, str):
            headers["Authorization"] = _with_scheme(given)
        elif isinstance(given, Mapping):
            headers |= {str(name): str(value) for name, value in given.items()}
        else:
            auth = given
    try:
        http.headers.update(headers)
        http.auth = auth
    except (TypeError, ValueError):
        # The text of the error, and the chained error itself, would quote the value.
        raise OptionError(
            "feedapi source: the credentials of authEnv, authCallable or headerEnv.NAME can't be "
            "sent: they must be printable ASCII text, and a function must return a str, a mapping "
            "of headers or an httpx.Auth"
        ) from None


def _environment(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise OptionError(
            f"feedapi source: option {option} names the environment variable {variable}, which is "
            "not set in this process. Set it for the driver and for the executors "
            f"(spark.executorEnv.{variable})"
        )
    return value


def _with_scheme(value: str) -> str:
    return value if " " in value.strip() else f"Bearer {value.strip()}"


def _call(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"feedapi source: option authCallable: {path} can't be imported "
            f"({type(error).__name__}). It must be importable on the driver and on every executor"
        ) from error
    return function()  # type: ignore[operator]
