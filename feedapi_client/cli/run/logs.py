"""Log records of ``feedapi run`` on stderr, as text or as JSON."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

from feedapi_client.cli.common.escape import escape_json
from feedapi_client.cli.run.options import LogFormat

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
