"""What commands write: text from elsewhere escaped, tables, JSON, events, and progress."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import select
import stat
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from feedapi_client.protocol.text import printable

if TYPE_CHECKING:
    from rich.table import Table

    from feedapi_client.consumer import FeedConsumer

MAX_SHOWN, MAX_LINE = 200, 2000
"""Characters of a text from a publisher or a file that are shown, and of a whole line."""
RECORD = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The last one is uvicorn's: its message once more, with escape sequences of colours.
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({}))} | {
    *("message", "asctime", "taskName", "color_message")
}
_JSON_ESCAPED = re.compile(r"[^\n -~]")


def shown(text: object, limit: int = MAX_SHOWN) -> str:
    """Return a text from elsewhere on one line, cut, without characters that a terminal acts upon.

    Backslashes stay as they are, so that a text that is escaped already is not escaped twice.
    """
    line = printable(" ".join(str(text)[: limit + 1].split()), limit + 1)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape_json(text: str, encoding: str | None = "utf-8") -> str:
    r"""Return JSON that means the same, with ``\u`` escapes for what can't be shown.

    These are the characters that are not printable, and those that `encoding` does not have.
    """
    unicode = (encoding or "").lower().startswith("utf")

    def escaped(found: re.Match[str]) -> str:
        if unicode and found[0].isprintable():
            return found[0]
        units = found[0].encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))

    return _JSON_ESCAPED.sub(escaped, text)


def json_text(value: Any) -> str:
    data = value if isinstance(value, bytes) else orjson.dumps(value, option=orjson.OPT_INDENT_2)
    return escape_json(data.decode(), sys.stdout.encoding)


def print_json(value: Any) -> None:
    print(json_text(value))


def say(text: str, level: int = logging.INFO) -> None:
    """Print a line on stderr, in one piece: log records of other threads come before or after.

    Where records are JSON it is one of them, of this level. A stderr that can't be written changes
    nothing.
    """
    line = shown(text, MAX_LINE)
    if any(isinstance(each.formatter, JSONLines) for each in logging.getLogger().handlers):
        logging.getLogger("feedapi").log(level, "%s", line)
        return
    try:
        sys.stderr.write(f"feedapi: {line}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


class JSONLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: each for key, each in vars(record).items() if key not in _OF_EVERY_RECORD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escape_json(orjson.dumps(line, default=str).decode())


def write_records(*, json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if json else logging.Formatter(RECORD))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(json)
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class OnceAMinute(logging.Filter):
    """Leaves out the next failed attempts of what a record of the last minute has said already."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        failure, attempt, _ = record.getMessage().partition("; attempt ")
        since = record.created - 60.0
        self._said = {text: at for text, at in self._said.items() if at > since}
        if attempt and failure in self._said:
            return False
        self._said[failure] = record.created
        return True


def print_line(text: object, *, indent: str = "") -> None:
    print(f"{indent}{shown(text, MAX_LINE)}")


def report(text: object, *, escaped: bool = False) -> None:
    """Print what was done. It is done, and no error, where stdout can't be written."""
    line = str(text) if escaped else shown(text, MAX_LINE)
    try:
        print(line, flush=True)
    except OSError as error:
        discard(sys.stdout)
        if error.errno != errno.EPIPE:
            say(f"stdout can't be written ({error.strerror}), but this is done: {line}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(table(columns, rows))
        return
    for row in (columns, *rows):
        print("\t".join(map(shown, row)))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns)
    for row in rows:
        drawn.add_row(*(Text(shown(cell)) for cell in row))  # in which rich finds no markup
    return drawn


def age(seconds: float | None) -> str:
    """Return a duration in its largest fitting unit, nothing for None."""
    if seconds is None:
        return ""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{seconds / size:.0f} {unit}"


def prepare_streams() -> None:
    """Let stdout and stderr take any text, whatever their encoding."""
    if sys.stderr is None:  # a caller closed it, and another file could get its descriptor
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("feedapi: stdout is closed\n")
        raise SystemExit(1)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Drop what the stream still holds, because Python would write it once more at its exit."""
    with suppress(OSError, ValueError):
        descriptor, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


async def write_bytes(data: bytes) -> None:
    """Write data on stdout, in a thread: a slow reader does not hold up signals."""
    from anyio.to_thread import run_sync

    if data:
        await run_sync(_write, data)


def _write(data: bytes) -> None:
    if sys.stdout.isatty():  # JSON forbids only control characters below U+0020 in a text
        data = escape_json(data.decode("utf-8", "backslashreplace")).encode()
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:
        sys.stdout.buffer.write(data)
        return
    # Not with sys.stdout: when Python runs unbuffered it writes only a part of the data, and after
    # a failure it keeps the rest and tries again when Python exits.
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process made the pipe or terminal non-blocking
            select.select([], [descriptor], [])


async def reader_gone() -> None:
    """Wait until the reader of a pipe is gone, for ever where stdout is no pipe.

    Without this it is noticed only at the next write.
    """
    import anyio

    with suppress(OSError, AttributeError):  # stdout is no file, or the system has no poll()
        descriptor, poll = sys.stdout.fileno(), select.poll()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            poll.register(descriptor, 0)
            while not poll.poll(0):  # noqa: ASYNC110 - the event loop can't wait for this event
                await anyio.sleep(0.5)
            return
    await anyio.sleep_forever()


@asynccontextmanager
async def progress(
    look: Callable[[], tuple[FeedConsumer | None, int]], *, quiet: bool, beside_output: bool = False
) -> AsyncIterator[None]:
    """Show events and states of partitions within the block, where stderr is a terminal.

    With `beside_output` not where stdout is one too, so that it does not mix with the events.
    """
    if quiet or not sys.stderr.isatty() or (beside_output and sys.stdout.isatty()):
        yield
        return
    import anyio
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    column = TextColumn("{task.completed:,} events · {task.description}", style="bold")
    line = Progress(column, console=Console(stderr=True), redirect_stdout=False)
    task = line.add_task("", total=None)

    def show() -> None:
        consumer, events = look()
        partitions = consumer.status().partitions.values() if consumer is not None else ()
        states = sorted(Counter(each.state.value for each in partitions).items())
        text = ", ".join(f"{count} {state}" for state, count in states)
        line.update(task, completed=events)  # the speed is known behind this
        line.update(task, description=f"{line.tasks[0].speed or 0:,.0f}/s · {text}")

    async def refresh() -> None:
        while True:  # in the event loop: a thread must not read a consumer
            show()
            await anyio.sleep(0.5)

    with line:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refresh)
            yield
            tasks.cancel_scope.cancel()
        show()
