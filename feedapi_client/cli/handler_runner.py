"""Run the application's handler until the end of the feed, a signal or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from feedapi_client.arguments import awaitable_of
from feedapi_client.causes import failure_of
from feedapi_client.cli.command import FENCED, HANDLER_FAILED, SIGNALLED, Stopping, stopping
from feedapi_client.cli.handler_import import Handler, import_handler, open_handler
from feedapi_client.cli.run import AT_ONCE, LogFormat, RunOptions
from feedapi_client.cli.terminal import escape_json, say
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import FeedError, FencedError
from feedapi_client.model import Batch, Event
from feedapi_client.options import Share
from feedapi_client.runtime.by_key import EVENT_HANDLER
from feedapi_client.runtime.handlers import HANDLER


class Runner:
    """One execution of the command.

    One consumer and one process. With ``--share`` several processes of one name each have a
    `Runner` of their own, and divide the partitions.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self._handler_error: Exception | None = None
        self._form = HANDLER if options.key_path() is None else EVENT_HANDLER

    async def run(self) -> int:
        """Consume, and return the exit code."""
        function = import_handler(self.options.handler, self._form)
        try:
            async with stopping(self.options.grace) as stop:
                await self._consume(function, stop)
        except Exception as error:  # noqa: BLE001 - it is raised, or has an exit code of its own
            return self._exit_code(error)
        cut_short = stop.consumer is not None and stop.consumer.cut_short
        return SIGNALLED + stop.number if cut_short and stop.number else 0

    def _exit_code(self, error: BaseException) -> int:
        """Report an error and return its exit code, or raise it for the command to report."""
        if isinstance(error, FencedError):
            return _fail(str(error), FENCED)
        if error is not self._handler_error or isinstance(error, FeedError):
            raise error from None
        # Without its text: that may hold a payload.
        return _fail(f"the handler failed with {type(error).__qualname__}", HANDLER_FAILED)

    async def _consume(self, function: Callable[..., Any], stop: Stopping) -> None:
        o = self.options
        async with (
            o.place.open(create=True, journal=o.history()) as store,
            o.feed.consumer(
                store,
                start=None if o.start is None else o.start.value,
                follow=o.follow,
                share=Share() if o.share else None,
                on_error="park" if o.park else "raise",
            ) as consumer,
            consumer,
        ):
            stop.consumer = consumer
            async with open_handler(o.handler, function, self._form) as handle:
                await self._run(consumer, handle)

    async def _run(self, consumer: FeedConsumer, handle: Handler) -> None:
        options, path = self.options, self.options.key_path()
        policy = options.policy()
        if path is None:
            at_once = options.max_concurrency or AT_ONCE
            await consumer.run(self._noting(handle), on_failure=policy, max_concurrency=at_once)
            return
        try:
            await consumer.run_by_key(
                handle,
                key=KeyAt(path),
                on_failure=policy,
                max_concurrency=options.concurrency or AT_ONCE,
            )
        except Exception as error:
            self._handler_error = error  # errors of the feed and of the store are FeedErrors
            raise

    def _noting(self, handle: Handler) -> Handler:
        """Return the handler with a note of its last error, to tell it from errors of the feed."""

        async def noting(batch: Batch) -> None:
            try:
                await awaitable_of(handle(batch), "the handler", HANDLER)
            except BaseException as error:  # noqa: BLE001 - raised
                self._handler_error = failure_of(error, "the handler", own_task=True)
                raise self._handler_error  # noqa: B904 - the cause is set

        return noting


class KeyAt:
    """The function of an event that returns its key: what is at one place of its payload.

    `path`: the names of members, and the numbers of elements, that lead there.
    """

    def __init__(self, path: Sequence[str]) -> None:
        self._path = path

    def __call__(self, event: Event) -> Hashable:
        """Return the key. Raises LookupError if there is none, without a word of the payload."""
        found: Any = event.json()
        for part in self._path:
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise LookupError("the payload has nothing at --key")
        if isinstance(found, dict | list) or found is None:
            raise LookupError("what the payload has at --key is no text, number or boolean")
        key: Hashable = found
        return key


def _fail(text: str, code: int) -> int:
    say(text)
    return code


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_to_stderr(style: LogFormat) -> None:
    """Write the records of the library and of the application, from level INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if style is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class JSONLines(logging.Formatter):
    """One JSON object a line, with the record's structured fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escape_json(orjson.dumps(line, default=str).decode(), "utf-8")
