"""Checks of arguments, made where they are given: what is wrong is refused at once.

A wrong type is a `TypeError`, a wrong value a `ValueError`. The messages name the argument and what
it may be. A text is not shown unless it must be one of a few words: it may hold a password.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from feedapi_client.model import MAX_PARTITION, StartAt

_IDS = f"partitions' ids from 0 to {MAX_PARTITION}"
_NUMBERS = {"int": (int,), "float": (int, float)}
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_NAMES = {"int": "an integer", "float": "a number", "str": "a str", "bool": "True or False"}


def environment_value(variable: str, option: str) -> str:
    """Return the value of the environment variable that an option names, without spaces around it.

    Raises ValueError: it is not set, or what the option gives is no name. That may be the secret
    itself, which no message repeats.
    """
    value = os.environ.get(variable, "").strip()
    if value:
        return value
    if _VARIABLE.fullmatch(variable) is None:
        raise ValueError(
            f"{option} takes the name of an environment variable, not the value: arguments are "
            "visible to others. If that was a secret, it is in the history of your shell now"
        )
    raise ValueError(f"{option}: the environment variable {variable} is not set")


def import_function(path: str, option: str) -> Callable[..., Any]:
    """Import the function that MODULE:FUNCTION names, from the current directory too.

    It may be one of a class, such as ``module:Class.method``.

    Raises ValueError: `path` has another form, names no function, or can't be imported. The module
    may raise anything: where that is no error of the import, its text may hold a secret, and is not
    in the message.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{option} takes MODULE:FUNCTION, not {path!r}")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function: Any = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{option}: {path} can't be imported: {error}{place_of(error)}") from None
    except Exception as error:  # noqa: BLE001 - the application's module may raise anything
        kind = type(error).__name__
        raise ValueError(
            f"{option}: {path} can't be imported: {kind} in the module{place_of(error)}"
        ) from None
    finally:
        if here in sys.path:  # unless the module has changed it
            sys.path.remove(here)
    if not callable(function):
        raise ValueError(f"{option}: {path} is no function")
    return function  # type: ignore[no-any-return]


def place_of(error: BaseException, module: str | None = None) -> str:
    """Where in the application's files an error was raised, for the end of a message.

    In the file of the module, where the error came through it.
    """
    if isinstance(error, SyntaxError):
        return ""  # its text says where
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    own = [each for each in frames if each.filename == file]
    if not own:
        own = [each for each in frames if Path(each.filename).is_relative_to(Path.cwd())]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def check_fields(options: Any) -> None:
    """Check the types of a dataclass's fields whose annotations are those of plain values.

    These are bool, str, int and float, with or without ``| None``. All others are left out.
    """
    for each in fields(options):
        kind, _, rest = str(each.type).partition(" | ")
        if kind in _NAMES and rest in ("", "None"):
            name = f"{type(options).__name__}.{each.name}"
            check_plain(name, getattr(options, each.name), kind, optional=rest == "None")


def check_plain(name: str, value: object, kind: str, *, optional: bool = False) -> None:
    """Raise TypeError unless `value` is of `kind`: "bool", "str", "int" or "float".

    A bool is no number.
    """
    if optional and value is None:
        return
    types = _NUMBERS.get(kind, (bool,) if kind == "bool" else (str,))
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        may_be = _NAMES[kind] + (" or None" if optional else "")
        raise TypeError(f"{name} must be {may_be}, not {_described(value)}")


def check_count(name: str, value: object, *, least: int = 1) -> None:
    check_plain(name, value, "int")
    assert isinstance(value, int)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_seconds(name: str, value: object, *, optional: bool = True) -> None:
    """Raise unless `value` is a number of seconds, not negative; None if that is allowed."""
    check_plain(name, value, "float", optional=optional)
    if isinstance(value, (int, float)) and not value >= 0:
        raise ValueError(f"{name} must be a number of seconds, not negative: not {value}")


def check_word(name: str, value: object, words: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `words`."""
    if not isinstance(value, str) or value not in words:
        *others, last = map(repr, words)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def check_instance(name: str, value: object, types: type | tuple[type, ...], what: str) -> None:
    """Raise TypeError unless `value` is None or an instance; `what` says what it may be."""
    if value is not None and (not isinstance(value, types) or isinstance(value, type)):
        raise TypeError(f"{name} must be {what}, not {_described(value)}")


def check_function(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, not {_described(value)}")


def check_partitions(name: str, value: object, *, empty: bool = False) -> None:
    """Raise unless `value` is a collection of partitions' ids."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a collection of partitions' ids, not {_described(value)}")
    for id in value:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= MAX_PARTITION:
            raise ValueError(f"{name} must hold {_IDS}; it has {id!r}")
    if not value and not empty:
        raise ValueError(f"{name} must name a partition; None stands for all of them")


def checked_start(start: StartAt) -> StartAt:
    """Return `start`, copied when it is a mapping of partition to cursor."""
    if isinstance(start, Mapping):
        check_partitions("start", start, empty=True)
        for partition, cursor in start.items():
            check_plain(f"start: the cursor of partition {partition}", cursor, "str")
            if not cursor:
                raise ValueError(f"start: the cursor of partition {partition} is empty")
        return dict(start)
    wanted = "start must be 'first', 'last' or a mapping of partition to cursor, not "
    if not isinstance(start, str):
        raise TypeError(f"{wanted}a {type(start).__name__}")
    if start not in ("first", "last"):
        raise ValueError(f"{wanted}{start!r}")
    return start


def checked_lineage(lineage: Mapping[int, int | None] | None) -> dict[int, int | None]:
    """Return a copy of ``{child: parent}``; None stands for no parent."""
    edges = dict(lineage or {})
    check_partitions("lineage", edges, empty=True)
    check_partitions("lineage", [p for p in edges.values() if p is not None], empty=True)
    return edges


def parse_lineage(text: str) -> dict[int, int | None]:
    """Return the edges of ``"1:0,2:0,3:none"`` (child:parent), as `FeedConsumer` takes them.

    Raises ValueError for another form, an id out of range, and a child with two parents.
    """
    edges: dict[int, int | None] = {}
    for part in text.split(","):
        child, colon, parent = (word.strip() for word in part.partition(":"))
        none = parent.lower() == "none"
        ids = (child,) if none else (child, parent)
        if not colon or not all(id.isascii() and id.isdigit() and len(id) <= 5 for id in ids):
            raise ValueError(
                f"must be pairs of child and parent such as 1:0,2:0,3:none, with {_IDS}"
            )
        value = None if none else int(parent)
        if edges.setdefault(int(child), value) != value:
            raise ValueError(f"gives partition {int(child)} two parents")
    return checked_lineage(edges)


def check_texts(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of names to values, not {_described(value)}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"{name} must map str to str; that of {key!r} is {_described(text)}")


def check_async_function(name: str, value: object, example: str) -> None:
    """Raise TypeError for what is surely no function with ``async``.

    A lambda, a class with its own `__call__` in C, and a function annotated to return an awaitable
    may return one: what they return is checked when they are called, see `awaitable_of`.
    """
    check_function(name, value)
    layers = list(_layers(value))
    if any(map(inspect.iscoroutinefunction, layers)):
        return
    innermost = layers[-1]
    if inspect.isasyncgenfunction(innermost):
        raise TypeError(f"{name} must not yield: it is an async generator, not {example}")
    if isinstance(value, type) or (inspect.isfunction(innermost) and not _may_await(innermost)):
        raise TypeError(f"{name} must be a function with async: {example}")


def awaitable_of(result: Any, name: str, example: str) -> Any:
    """Return what a call gave. Raises `NotAsyncError` if that can't be awaited."""
    if inspect.isawaitable(result):
        return result
    raise NotAsyncError(
        f"{name} must be a function with async: {example}. It returned {_described(result)}, "
        "which can't be awaited"
    )


def check_plain_function(name: str, value: object, example: str = "") -> None:
    """Raise TypeError for what is no function, or one with ``async``."""
    check_function(name, value)
    if any(map(_is_async, _layers(value))):
        raise TypeError(
            f"{name} must be a function without async" + (f": {example}" if example else "")
        )


def check_not_awaitable(result: object, name: str, example: str) -> None:
    """Raise `NotPlainError` if what a call of an ordinary function gave has to be awaited."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise NotPlainError(
            f"{name} must be an ordinary function, without async: {example}. It returned "
            f"{_described(result)}, which nobody awaits"
        )


class WrongFunctionError(TypeError):
    """A function of the application is of the wrong kind. Calling it again can't help."""


class NotAsyncError(WrongFunctionError):
    """A function of the application is not asynchronous."""


class NotPlainError(WrongFunctionError):
    """A function of the application is asynchronous, and nobody would await it."""


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _layers(value: Any) -> Any:
    """The function, and those that it wraps: by `partial`, `__wrapped__`, a method, `__call__`."""
    while True:
        yield value
        if isinstance(value, partial):
            value = value.func
        elif hasattr(value, "__wrapped__"):
            wrapped = value.__wrapped__
            if not inspect.isfunction(value) and not isinstance(value, type):
                yield type(value).__call__  # asgiref's sync_to_async wraps a plain function
            value = wrapped
        elif inspect.ismethod(value):
            value = value.__func__
        elif not inspect.isroutine(value) and not isinstance(value, type):
            call: Callable[..., Any] = type(value).__call__
            if not inspect.isfunction(call):
                return
            value = call
        else:
            return


def _may_await(function: Any) -> bool:
    annotated = function.__annotations__.get("return")
    return function.__name__ == "<lambda>" or (
        annotated is not None and any(word in str(annotated) for word in _AWAITABLES)
    )


_AWAITABLES = ("Awaitable", "Coroutine", "Future", "Task")


def _described(value: object) -> str:
    """What a value is, without showing more of it than its type, unless it is a number."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"a {type(value).__name__}"


class OneProcess:
    """Something that a fork does not carry over: connections, threads, what is entered.

    Its first use in a child of the process that made it says so.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        return os.getpid() == self._pid

    def check(self, name: str, *, error: Callable[[str], Exception] = RuntimeError) -> None:
        if not self.is_this:
            raise error(
                f"{name} was opened in another process, before a fork: open it in the process "
                "that uses it"
            )
