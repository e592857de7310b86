"""What lies beneath an error of a driver or an HTTP client, in words of ours.

Texts of other libraries may quote a password, a value or received bytes. Here they are only
classified, and never quoted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator

import anyio

_UNKNOWN_HOST = {
    code
    for name in ("EAI_NONAME", "EAI_NODATA")
    if (code := getattr(socket, name, None)) is not None
}
_ERRNO = {
    errno.ECONNREFUSED: "the connection was refused: does the server run, and at this port?",
    errno.ECONNRESET: "the connection was reset",
    errno.EHOSTUNREACH: "the host can't be reached",
    errno.ENETUNREACH: "the network can't be reached",
    errno.ETIMEDOUT: "the connection timed out",
    errno.EPIPE: "the connection was closed",
    errno.ENOSPC: "the disk is full",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "the permission is missing",
    errno.ENOENT: "the file or socket does not exist",
}
_CREDENTIALS = "the user or the password is refused"
_NO_DATABASE = "there is no such database"
_NO_TABLE = "a table is missing"
_FORBIDDEN = "the user has no permission for this"
_FULL = "the disk is full"
_TOO_MANY = "the server has too many connections"
_HOST = "the host is unknown"
_POOL = "the pool of connections is not open: open it before the consumer, and close it after"
_PREPARED = (
    "a prepared statement is lost, as behind PgBouncer in transaction mode: switch them off in the "
    "pool, with prepare_threshold=None of psycopg or statement_cache_size=0 of asyncpg"
)
_REFUSED = _ERRNO[errno.ECONNREFUSED]
# PostgreSQL's SQLSTATE, the error numbers of MySQL and MariaDB, and the names that SQLite gives.
_CODES: dict[object, str] = {
    "28P01": _CREDENTIALS,
    "28000": _CREDENTIALS,
    1045: _CREDENTIALS,
    1698: _CREDENTIALS,
    "3D000": _NO_DATABASE,
    1049: _NO_DATABASE,
    "42P01": _NO_TABLE,
    1146: _NO_TABLE,
    "42501": _FORBIDDEN,
    1044: _FORBIDDEN,
    1142: _FORBIDDEN,
    "53100": _FULL,
    1021: _FULL,
    "53300": _TOO_MANY,
    1040: _TOO_MANY,
    "26000": _PREPARED,
    "42P05": _PREPARED,
    "SQLITE_IOERR": "the disk has an error",
    "SQLITE_CANTOPEN": "the database file can't be opened",
    "SQLITE_NOTADB": "the file is no database",
    "SQLITE_CORRUPT": "the database file is damaged",
    "SQLITE_READONLY": "the database can only be read",
    "SQLITE_FULL": _FULL,
    "SQLITE_BUSY": "another connection holds the lock of the database",
}
# Where a driver gives no code: of psycopg before it is connected, of Redis, and SQLite's one.
_TEXTS = (
    ("password authentication failed", _CREDENTIALS),
    ("no password supplied", _CREDENTIALS),
    ("wrongpass", _CREDENTIALS),
    ("noauth", _CREDENTIALS),
    ("invalid username-password pair", _CREDENTIALS),
    ("authentication required", _CREDENTIALS),
    ('" does not exist', _NO_DATABASE),
    ("oom command not allowed", "the server's memory is full (maxmemory)"),
    ("misconf ", "the server can't write to its disk"),
    ("can't write against a read only replica", "the server is a replica, which can only be read"),
    ("noperm", _FORBIDDEN),
    ("has no permissions to", _FORBIDDEN),
    ("acl failure in script", _FORBIDDEN),
    ("can't run this command", _FORBIDDEN),
    ("wrong kind of value", "a key of that name holds something else"),
    ("noreplicas", "the server has too few replicas to accept a write"),
    ("clusterdown", "the cluster is down"),
    ("masterdown", "the server's primary is down"),
    ("loading redis", "the server is still loading its data"),
    ("busy redis", "the server is busy with a script"),
    ("no such table", _NO_TABLE),
    ("connection refused", _REFUSED),
    ("translate host name", _HOST),
    ("resolve host", _HOST),
    ("name or service not known", _HOST),
    ("no address associated with hostname", _HOST),
    ("timeout expired", "the connection timed out"),
    ("server closed the connection", "the connection was closed"),
    ("too many clients", _TOO_MANY),
    ("' is not open yet", _POOL),
    ("' is already closed", _POOL),
    ("pool is not initialized", _POOL),
    ("pool is clos", _POOL),
    ("couldn't get a connection", "no connection of the pool became free in time"),
)
_ROLE = 'role "'
_LINKS = 20


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors beneath it: causes, contexts, members of groups."""
    left = _LINKS
    todo = [error]
    while todo and left:
        each = todo.pop()
        if each is None:
            continue
        left -= 1
        yield each
        todo += [each.__context__ if each.__cause__ is None else None, each.__cause__]
        todo.append(getattr(each, "orig", None))  # SQLAlchemy's name for the driver's error
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


class StrayCancellationError(RuntimeError):
    """A call let a `CancelledError` out, which is its cause, although nobody cancelled it (R20)."""


def failure_of(
    error: BaseException, call: str = "the call", *, own_task: bool = False
) -> Exception:
    """Return what a call has failed with: a cancellation that nobody asked for is an error, too.

    The task was not cancelled then. The call awaited something that others have cancelled, such as
    a task that several calls share.

    Raises the error itself where it is to end the task: a cancellation that was asked for, or a
    KeyboardInterrupt.

    Arguments:
        call: what it was, for the message.
        own_task: the task is one of the library's, which cancels it by scopes of anyio only. A
            native cancellation of it is not one of what the application awaits.
    """
    if isinstance(error, Exception):
        return error
    if not _is_stray(error, own_task=own_task):
        raise error
    stray = StrayCancellationError(f"{call} let a {type(error).__name__} out that nobody asked for")
    stray.__cause__ = error
    return stray


def _is_stray(error: BaseException, *, own_task: bool) -> bool:
    """Whether an error is a cancellation that is not one of the task that it has come to."""
    native = asyncio.CancelledError
    try:
        ours = anyio.get_cancelled_exc_class()
    except RuntimeError:  # no event loop runs, so nobody can cancel
        return _is_cancellation(error, (native,))
    if not _is_cancellation(error, (native, ours)):
        return False
    if isinstance(error, native) and ours is not native:
        return True  # on trio it is no cancellation, even while one is under way
    if anyio.current_effective_deadline() == float("-inf"):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio, which cancels by scopes only
        return True
    while own_task and task is not None and task.cancelling():
        task.uncancel()
    return task is None or not task.cancelling()


def _is_cancellation(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether it is one, or a group of some and of errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(isinstance(e, Exception) or _is_cancellation(e, kinds) for e in error.exceptions)
    return isinstance(error, kinds)


def is_unknown_host(error: BaseException) -> bool:
    """Whether an error says that a host has no address, and not that no resolver answers."""
    return isinstance(error, socket.gaierror) and error.errno in _UNKNOWN_HOST


def network_problem(error: BaseException) -> str | None:
    """Return what the operating system says about a connection; None if it says nothing."""
    for each in causes(error):
        if is_unknown_host(each):
            return _HOST
        if isinstance(each, OSError) and each.errno in _ERRNO:
            return _ERRNO[each.errno]
    return None


def store_problem(error: BaseException) -> str | None:
    """Return why a database or a server of cursors refuses its work; None if that is unknown."""
    chain = list(causes(error))
    for each in chain:
        if (problem := _by_code(each)) is not None:
            return problem
    if (problem := network_problem(error)) is not None:
        return problem
    for each in chain:
        text = _text(each)
        for part, problem in _TEXTS:
            if part in text:
                return _CREDENTIALS if problem is _NO_DATABASE and _ROLE in text else problem
        if isinstance(each, TimeoutError):
            return "it timed out"
        if isinstance(each, OSError) and each.errno is not None:
            return os.strerror(each.errno).lower()
    return None


_DEAD_STATES = ("08", "57P01", "57P02", "57P03")
"""SQLSTATEs of a connection that is gone, or of a server that ends them all."""
_DEAD_NUMBERS = (2006, 2013, 2055, 4031)
"""MySQL's numbers for the same."""
_DEAD_TEXTS = (
    "server closed the connection",
    "connection is closed",
    "connection was closed",
    "connection is lost",
    "connection already closed",
    "connection closed by server",
    "consuming input failed",
    "underlying connection is closed",
)


def is_dead_connection(error: BaseException | None) -> bool:
    """Whether a store's connection was closed while nobody used it, so that a new one may do."""
    for each in causes(error):
        if getattr(each, "connection_invalidated", False):  # SQLAlchemy's word for it
            return True
        state, number = getattr(each, "sqlstate", None), each.args[0] if each.args else None
        if isinstance(state, str) and state.startswith(_DEAD_STATES):
            return True
        if isinstance(each, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)):
            return True
        if isinstance(number, int) and number in _DEAD_NUMBERS and not isinstance(each, OSError):
            return True
        if any(text in _text(each) for text in _DEAD_TEXTS):
            return True
    return False


def _by_code(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None)
    number = error.args[0] if error.args else None
    # Of an extended code, such as SQLITE_IOERR_READ, the first two parts.
    sqlite = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    for code in (state, number, sqlite):
        if isinstance(code, (str, int)) and not isinstance(error, OSError) and code in _CODES:
            return _CODES[code]
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error).lower()
    except Exception:  # noqa: BLE001 - an exception without a text says nothing
        return ""
