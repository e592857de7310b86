"""Where secrets come from: the environment of the process that makes the request, or a function of the user's. Never from an option's value."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from feedapi_client.spark.options import OptionError, SourceOptions


def authorize(http: Any, options: SourceOptions) -> None:
    """Give an `httpx.Client` the headers and credentials that the options name, as they are in this process.

    Raises `OptionError` when an environment variable is not set or the function is not there, naming it and never a value.
    """
    headers = {
        **options.headers,
        **{
            header: _environment(variable, f"headerEnv.{header}")
            for header, variable in options.header_env.items()
        },
    }
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
        # Its text, and the error itself, would quote the value.
        raise OptionError(
            "feedapi source: what authEnv, authCallable or headerEnv.NAME leads to can't be sent: it has to be printable ASCII text, "
            "and a function returns a str, a mapping of headers or an httpx.Auth"
        ) from None


def _environment(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise OptionError(
            f"feedapi source: option {option} names the environment variable {variable}, which is not set in this process. "
            f"Set it for the driver and for the executors (spark.executorEnv.{variable})"
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
            f"feedapi source: option authCallable: {path} can't be imported ({type(error).__name__}). It has to be on every executor"
        ) from error
    return function()  # type: ignore[operator]
