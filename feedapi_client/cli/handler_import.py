"""The application's handler that ``--handler MODULE:FUNCTION`` names."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from feedapi_client.arguments import check_async_function, import_function, place_of
from feedapi_client.causes import store_problem
from feedapi_client.cli.command import USAGE, CommandError
from feedapi_client.protocol.text import printable
from feedapi_client.runtime.handlers import HANDLER

Handler = Callable[[Any], Awaitable[object]]
_CHARACTERS = 500
_URL_SECRETS = (
    (re.compile(r"(://)[^/\s@'\"]+@"), r"\1***@"),
    (re.compile(r"(https?://[^\s?#'\"]*)[?#][^\s'\"]*"), r"\1?***"),
    (
        re.compile(r"(?i)\b(pass(?:word|wd)?|pwd|secret|token|api[_-]?key)(\s*[=:]\s*)\S+"),
        r"\1\2***",
    ),
)


def import_handler(path: str, form: str = HANDLER) -> Callable[..., Any]:
    """Import the function MODULE:FUNCTION, from the current directory too.

    `form`: what it has to look like, for messages.

    Raises `CommandError` when it can't be imported, or has another form.
    """
    try:
        function = import_function(path, "--handler")
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    if _takes_a_batch(function):
        _check(path, function, form)
    return function


@asynccontextmanager
async def open_handler(
    path: str, function: Callable[..., Any], form: str = HANDLER
) -> AsyncIterator[Handler]:
    """Give the handler that the function is, or that it opens.

    A function without parameters returns an asynchronous context manager whose value is the
    handler: the place for what the handler needs, such as a pool of connections. It is closed at
    the end of the block. Raises `CommandError` for any other function, and `CommandError` when it
    can't be opened.
    """
    if _takes_a_batch(function):
        yield function
        return
    async with AsyncExitStack() as stack:
        try:
            handler = await stack.enter_async_context(function())
        except TypeError as error:
            raise CommandError(
                f"--handler {path} takes no batch and no event, so {error}", USAGE
            ) from None
        except Exception as error:
            raise CommandError(
                f"--handler {path} can't be opened: {_described(error)}{place_of(error)}"
            ) from error
        _check(path, handler, form)
        yield handler


def _check(path: str, handler: object, form: str) -> None:
    try:
        check_async_function(f"--handler {path}", handler, form)
    except TypeError as error:
        raise CommandError(str(error), USAGE) from None


def _described(error: Exception) -> str:
    """The error on one line, with why a database or a server is out of reach where that is known.

    Credentials and queries of URLs are masked.
    """
    text = store_problem(error)
    if text is None:
        text = printable(str(error)[:_CHARACTERS])
        for pattern, replacement in _URL_SECRETS:
            text = pattern.sub(replacement, text)
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name


def _takes_a_batch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True  # written in C: its signature can't be known
    return any(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
        for each in parameters
    )
