"""What to ingest: the arguments of a pipeline, checked before Spark is asked; and its errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, product
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

Transform = Callable[[DataFrame, int], DataFrame | None]

FILE_FORMATS = ("parquet",)
FORMATS = (*FILE_FORMATS, "delta")
CORRUPT = "_corrupt"

TABLES = ("output", "bronze", "rejected", "gold")

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_COLON = rf"file://[^/]|(?:{_SCHEME.pattern}(?://[^/]*)?)?+[^:]*:"
_PATTERN = r"[\[\]{}*?\\\x00-\x1f]"
_NOT_IN_FOLDER = r"^\.|[/\\=*?\[\]{}%:#\"\x00-\x1f\x7f]"
FOLDER_BYTES = 255
"""Of the longest name of a folder."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What the name of a folder has for NULL."""
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_LONGEST = 10**12
_OWN_FOLDER = "_feedapi"
_OWN_WRITER_OPTIONS = frozenset(
    ["mergeschema", "partitionoverwritemode", "replacewhere", "txnappid", "txnversion", "path"]
)


class IngestError(ValueError):
    """The tables, the checkpoint and the arguments don't belong together. Nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """What to ingest, and into which tables.

    A table is a folder of Parquet files, or the name of a Delta table. Every row of every table but
    `gold` belongs to a micro-batch of a query, which is written once.

    Arguments:
        url: of the feed.
        output: table of the events, typed when there is a `schema`.
        format: one of `FORMATS`.
        schema: columns of the payload, as DDL. `NOT NULL` columns are required. Without a schema
            the payload stays JSON.
        bronze: table of every event as sent, beside a typed `output`.
        rejected: table of the events that do not fit the schema, with the reason. Without it they
            are rows of `output` with their payload in column ``_corrupt``.
        gold: table of the latest state of each entity. Needs `schema`, `key`, `rejected`, and
            Delta, which has MERGE. For folders see `feedapi_client.spark.ingest.latest`.
        key: columns of the payload that identify an entity.
        delete_when: SQL condition on the columns of `output`. An entity whose latest event
            fulfils it is deleted from `gold`.
        feed: name of the feed in column ``feed``. By default host and path of the URL.
        append: allow a new query to add to tables that hold rows of the same feed.
        resume_from_table: go on where the tables end, with a new checkpoint: the place in the feed
            is taken from `bronze`, or from `output` where that holds every event.
        prefix: put before the names of the columns that this library adds to `output` and `gold`,
            for payloads that have columns of the same names.
        keep_data: keep the payload as sent, in column ``data`` beside the typed columns.
        partition_by: columns of the folders or partitions of `output`.
        trigger: ``available-now``, or an interval such as ``10s``.
        transform: called with each micro-batch and its number. Returns what to write to `output`,
            or None when it wrote by itself. It may be called again with the same batch.
        checkpoint, staging: locations of the query's own files. By default in a folder inside
            `output`, where that is a folder.
        options: of the source.
        writer_options: of the format.

    Raises:
        IngestError: arguments contradict each other, or one is missing.
    """

    url: str = field(repr=False)  # it may hold a password, as may options
    output: str
    format: str = "parquet"
    schema: str | None = None
    bronze: str | None = None
    rejected: str | None = None
    gold: str | None = None
    key: Sequence[str] = ()
    delete_when: str | None = None
    feed: str | None = None
    append: bool = False
    resume_from_table: bool = False
    prefix: str = ""
    keep_data: bool = True
    partition_by: Sequence[str] = ()
    trigger: str = "available-now"
    transform: Transform | None = None
    checkpoint: str | None = None
    staging: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    writer_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        trigger_options(self.trigger)
        for problem in chain(self._problems(), self._problems_of_tables(), self._of_places()):
            raise IngestError(problem)

    def _problems(self) -> Iterator[str]:
        if self.format not in FORMATS:
            yield f"format must be {' or '.join(FORMATS)}, not {self.format!r}"
        if not self.is_files and None in (self.checkpoint, self.staging):
            yield (
                f"format {self.format} writes to a table: say with --checkpoint and --staging "
                "where the query keeps its own files"
            )
        empty = [
            name for name, given in vars(self).items() if name != "prefix" and _is_empty(given)
        ]
        if empty:
            yield f"{', '.join(empty)} is empty: leave it out, or was a variable to be set?"
        given = {name.lower(): value.strip().lower() for name, value in self.options.items()}
        later = given.get("startingcursors", "first") != "first"
        if later and (self.append or self.resume_from_table):
            yield (
                "--append and --resume-from-table need all events of a partition, so that column "
                "sequence tells which one is later: leave out option startingCursors"
            )
        if "endingcursors" in given:
            yield "a pipeline goes on where it was: leave out option endingCursors"
        if self.delete_when and given.get("ordered") == "false":
            yield "delete_when needs events in their order: leave out option ordered=false"
        ours = [name for name in self.writer_options if name.lower() in _OWN_WRITER_OPTIONS]
        if ours:
            yield f"writer options {', '.join(ours)} are set by the pipeline: leave them out"

    def _problems_of_tables(self) -> Iterator[str]:
        if self.schema is None and (self.bronze or self.rejected):
            yield "bronze and rejected need a schema: without one, output holds every event"
        if self.resume_from_table and self.whole_table is None:
            yield (
                "--resume-from-table needs a table of every event with its partition, cursor and "
                "sequence: bronze, or output without rejected and transform"
            )
        if self.gold is None and (self.key or self.delete_when):
            yield "key and delete_when describe gold: name its table"
        if self.gold is not None and self.is_files:
            yield (
                f"gold is kept up to date with MERGE, which format {self.format} can't do: take "
                "delta, or compute the latest state with feedapi_client.spark.ingest.latest"
            )
        if self.gold is not None and not (self.schema and self.key and self.rejected):
            yield "gold needs a schema, the key of an entity, and rejected for events without a key"

    def _of_places(self) -> Iterator[str]:
        tables = {name: path for name in TABLES if (path := getattr(self, name))}
        own = {name: path for name in ("checkpoint", "staging") if (path := getattr(self, name))}
        if not self.is_files:  # names in a catalog are compared where there is a session
            for name in [name for name, path in tables.items() if "/" in path]:
                yield (
                    f"{name} {tables[name]} is a path, and format {self.format} writes to tables "
                    "of a catalog: CREATE SCHEMA ... LOCATION names the folder of its tables"
                )
            yield from _problems_of_folders({}, own)
            return
        yield from _problems_of_folders(tables, own)
        folder = f"{self.prefix}feed={in_folder(self.feed_name)}".encode()
        if len(folder) > FOLDER_BYTES or self.feed_name == NO_VALUE:
            yield (
                f"the feed's name names a folder, of at most {FOLDER_BYTES} bytes, and {NO_VALUE} "
                "is read as NULL: give another one with --feed"
            )
        hidden = any(name.startswith(".") for name in self.partition_by)
        if hidden or re.search(_NOT_IN_FOLDER, self.prefix):
            yield (
                "prefix and partition_by name folders: they must not begin with a dot, which hides "
                'them, and prefix not hold any of / \\ = * ? [ ] { } % : # "'
            )

    @property
    def whole_table(self) -> str | None:
        """The table that holds every event, None where no table does."""
        if self.bronze is not None:
            return self.bronze
        return None if self.rejected is not None or self.transform is not None else self.output

    @property
    def is_files(self) -> bool:
        """Whether the tables are folders of files."""
        return self.format in FILE_FORMATS

    @property
    def feed_name(self) -> str:
        """The feed's name in the tables: without credentials and query, which may be secret."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return self.feed or f"{host}{parts.path.rstrip('/')}"

    @property
    def checkpoint_location(self) -> str:
        """Where the query keeps its checkpoint."""
        return self.checkpoint or f"{self.output.rstrip('/')}/{_OWN_FOLDER}/checkpoint"

    @property
    def staging_location(self) -> str:
        """Where the source stages epochs."""
        given = {name.lower(): value for name, value in self.options.items()}
        own = f"{self.output.rstrip('/')}/{_OWN_FOLDER}/staging"
        return given.get("staginglocation") or self.staging or as_url(own)

    @property
    def checkpoint_url(self) -> str:
        """The location of the checkpoint, the same for all its spellings."""
        return as_url(self.checkpoint_location)


def _is_empty(given: object) -> bool:
    if isinstance(given, str):
        return not given.strip()
    return isinstance(given, Sequence) and any(map(_is_empty, given))


def _problems_of_folders(tables: Mapping[str, str], own: Mapping[str, str]) -> Iterator[str]:
    places = {**tables, **own}
    for name, path in places.items():
        if re.search(_PATTERN, path) or re.match(_COLON, path):
            yield (
                f"{name} {path!r} can't be read back: Spark takes [ ] {{ }} * ? and \\ in a path "
                "for a pattern, text before : for a scheme, in lower case, and finds no host of "
                "file:. Name another folder"
            )
    urls = {name: as_url(path) for name, path in places.items()}
    if len({urls[name] for name in tables}) < len(tables):
        yield "output, bronze, rejected and gold must be different tables"
    for name, other in product(tables, places):
        hidden = other in own and urls[other].removeprefix(urls[name]).startswith(("/_", "/."))
        if name != other and f"{urls[other]}/".startswith(f"{urls[name]}/") and not hidden:
            yield f"{other} lies inside of {name}, where readers would take it for rows"


def as_url(path: str) -> str:
    """Return the URL of a location as Spark takes it, the same for all its spellings."""
    path = re.sub("^file:/*", "/", path).rstrip("/")
    if _SCHEME.match(path):
        return f"s3{path[3:]}" if path.startswith("s3a:") else path
    return Path(path or "/").resolve().as_uri()


def in_folder(text: str) -> str:
    """Return a text as the name of a folder has it: Spark reads `%C3` as one character."""
    return "".join(quote(one, safe="") if one.isascii() else one for one in text)


@dataclass
class Summary:
    """What one run wrote, as Spark counted it while it read the events.

    `rows` are those of `output`, or those that a transform was given. `unparsed` is the number of
    events that did not fit the schema: rows of `output`, or with `apart` of the table of rejected
    events. What is read again, as after a conflict in a Delta table, counts again.
    """

    output: str
    batches: int = 0
    rows: int = 0
    unparsed: int = 0
    seconds: float = 0.0
    apart: bool = False

    def __str__(self) -> str:
        rate = f", {self.rows / self.seconds:,.0f} rows/s" if self.seconds else ""
        rows = f"{self.rows:,} row{'' if self.rows == 1 else 's'}"
        if self.unparsed and self.apart:
            rows += f" and {self.unparsed:,} rejected"
        elif self.unparsed:
            rows += f", {self.unparsed:,} of them not fitting the schema,"
        batches = f"{self.batches} micro-batch{'' if self.batches == 1 else 'es'}"
        return f"{rows} in {batches} to {self.output} in {self.seconds:.1f} s{rate}"


def trigger_options(text: str) -> dict[str, Any]:
    """Return the keyword argument of ``DataStreamWriter.trigger``. Raises `IngestError`."""
    if text in ("available-now", "availableNow"):
        return {"availableNow": True}
    interval = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", text.strip(), re.ASCII)
    milliseconds = Decimal(interval[1]) * _MILLISECONDS[interval[2]] if interval else Decimal("0.1")
    if milliseconds > _LONGEST or milliseconds % 1:
        raise IngestError(
            "trigger must be available-now or an interval such as 500ms, 10s, 5m, of whole "
            f"milliseconds and at most {_LONGEST // 1000:,} s, not {text!r}"
        )
    return {"processingTime": f"{milliseconds:.0f} milliseconds"}


# ---------------------------------------------------------------------- what a person is told


class MicroBatchError(StreamingQueryException):
    """The query failed. The message is the cause in one line; ``__cause__`` is Spark's error."""


_OURS = re.compile(r"^(?:\w+\.)*feedapi_client\.[\w.]+(?:Error|Exception): (.+)$", re.MULTILINE)
# The first line of a traceback that is not indented. Some messages begin with a line end, and
# behind blank ones Spark puts a code.
_RAISED = re.compile(
    r"^(?:[\w<>]+\.)*(\w+)(?::\s*(?:SQLSTATE: \w{5}\s*)+$|(:[ \t]*(?:\n\s*)?\S.*))?$", re.MULTILINE
)
# Of py4j's errors, which PySpark does not translate where Delta raises them. Delta breaks lines.
_JAVA_CAUSE = re.compile(
    r"^(?:Caused by)?: (?:[\w$]+\.)*([\w$]+: (?:\[\w+\]\s+)?.+(?:\n(?!Caused by)\S.*)*)",
    re.MULTILINE,
)


def plain_message(error: Exception) -> str:
    """Return the message of an error in one line.

    Spark wraps the error of a micro-batch in tracebacks of several languages. The result is the
    text of this library's error if there is one, else the type and the first line of the error that
    the last Python traceback ends with, or of a Java cause, else the first line.
    """
    text, kind = str(error), type(error).__name__
    if ours := _OURS.findall(text):
        return str(ours[-1]).strip()
    _, traceback, raised = text.rpartition("Traceback (most recent call last):")
    if found := _RAISED.search(raised) if traceback else None:
        kind = found[1]
    if kind == "Py4JJavaError" and (causes := _JAVA_CAUSE.findall(raised)):
        return " ".join(causes[-1].split())
    if found:
        return f"{kind}{' '.join((found[2] or '').split())}"
    return next((line for line in map(str.strip, text.splitlines()) if line), kind)
