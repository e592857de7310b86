"""The application's handler that ``--handler MODULE:FUNCTION`` names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.model import Batch

Handler = Callable[[Batch], Awaitable[object]]


def import_handler(path: str) -> Callable[..., Any]:
    """Import the function MODULE:FUNCTION, from the current directory too.

    Raises `CommandError` when it can't be imported, and `typer.BadParameter` for another form.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise typer.BadParameter("--handler takes MODULE:FUNCTION")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"--handler {path} can't be imported: {error}") from None
    except Exception as error:  # noqa: BLE001 - the application's module may raise anything
        name = type(error).__name__
        raise CommandError(f"--handler {path} can't be imported: {name} in the module") from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise CommandError(f"--handler {path} is no function")
    plain = inspect.unwrap(function)
    if (
        _takes_a_batch(function)
        and inspect.isfunction(plain)
        and not inspect.iscoroutinefunction(plain)
    ):
        raise CommandError(f"--handler {path} has to be an 'async def'")
    return function  # type: ignore[no-any-return]


def reimport_handler(path: str) -> Callable[..., Any]:
    """Import the function once more, with all modules of its package, as they are now.

    When that fails, what was imported before stays. Raises what `import_handler` does.
    """
    package = path.partition(":")[0].partition(".")[0]
    before = {
        name: module
        for name, module in sys.modules.items()
        if name == package or name.startswith(f"{package}.")
    }
    for name in before:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        return import_handler(path)
    except BaseException:
        sys.modules.update(before)
        raise


@asynccontextmanager
async def open_handler(path: str, function: Callable[..., Any]) -> AsyncIterator[Handler]:
    """Give the handler that the function is, or that it opens.

    A function without parameters returns an asynchronous context manager whose value is the
    handler: the place for what the handler needs, such as a pool of connections. It is closed at
    the end of the block. Raises `CommandError` for any other function, and when it can't be opened.
    """
    if _takes_a_batch(function):
        yield function
        return
    async with AsyncExitStack() as stack:
        try:
            handler = await stack.enter_async_context(function())
        except TypeError as error:
            raise CommandError(f"--handler {path} takes no batch, so {error}") from None
        except Exception as error:
            kind = type(error).__qualname__
            raise CommandError(f"--handler {path} can't be opened: {kind}") from error
        yield handler


def _takes_a_batch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True  # written in C: its signature can't be known
    return any(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
        for each in parameters
    )
