"""The options of ``format("feedapi")``: strings in, checked values out. Imports no Spark."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import orjson

from feedapi_client.errors import NegotiationError
from feedapi_client.http.urls import FeedURL
from feedapi_client.lineage.graph import parse_lineage
from feedapi_client.model import MAX_PARTITION, checked_feed_name
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.text import are_valid

_SECRET = re.compile("auth|cookie|key|token|secret|passw|credential|signature", re.IGNORECASE)
_OPTION_OBJECT = r"\b(?:FetchOptions|Limits|RetryPolicy)\b"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MOST_SECONDS = 1e9
"""What clocks and timers take."""
_MOST = {"max_batch_bytes": 2**30, "max_line_bytes": 2**30}
"""An Arrow batch holds 2 GiB of text, and may be larger than `max_batch_bytes` by what comes
last."""
_SPARK_LIMITS = {
    "max_poll_interval": 2.0,
    "max_batch_bytes": 4 * 1024 * 1024,
    "slot_timeout": Limits().request_timeout,  # a trickle is worth no more than silence
}


class OptionError(ValueError):
    """An option is unknown, missing or wrong. Its one line names every such option."""


class UrlOptionError(NegotiationError, OptionError):
    """Option `url` can't be the URL of a feed, whatever else is wrong."""


# ---------------------------------------------------------------------- the value of one option


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def _integer(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if number < least:
            raise ValueError(f"must be at least {least}")
        if number > most:
            raise ValueError(f"must be at most {most}")
        return number

    return parse


def _seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError("must be a number of seconds") from None
    if not number >= 0:
        raise ValueError("must not be negative")
    if number > _MOST_SECONDS:
        raise ValueError(f"must be at most {_MOST_SECONDS:.0f}")
    return number


def _of_field(given: Field[Any]) -> Callable[[str], Any]:
    """Return the parser of a field of an option object, by its type."""
    kind = str(given.type)
    parse = _seconds if kind.startswith("float") else _integer(1, _MOST.get(given.name, 2**63 - 1))
    if not kind.endswith("| None"):
        return parse
    return lambda value: None if value.strip().lower() == "none" else parse(value)


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in re.split("[;,]", value) if name.strip())
    if not names:
        raise ValueError("must name at least one, separated by ';' or ','")
    return names


def _feed_name(value: str) -> str:
    try:
        return checked_feed_name(value.strip())
    except ValueError as error:
        raise ValueError(str(error).removeprefix("feed_name ")) from None


_NO_URL = "must be an http or https URL"


def _url(value: str) -> str:
    try:
        credentials = FeedURL.parse(value.strip()).basic_auth
    except NegotiationError:
        raise ValueError(_NO_URL) from None
    if credentials:
        raise ValueError(
            "must not hold credentials, which would show in query plans: use authEnv or "
            "authCallable"
        )
    return value.strip()


def _start(value: str) -> Any:
    if value.strip().lower() in ("first", "last"):
        return value.strip().lower()
    return _cursors(value, f"must be first, last, or {_CURSORS}")


_CURSORS = 'a JSON object of partition to cursor such as {"0": "abc"}'


def _cursors(value: str, problem: str = f"must be {_CURSORS}") -> dict[int, str]:
    try:
        given = orjson.loads(value)
        cursors = {_partition(key): cursor for key, cursor in given.items()}
        sound = bool(cursors) and are_valid(*cursors.values())
    except (ValueError, AttributeError, TypeError):
        raise ValueError(problem) from None
    if not sound:
        raise ValueError(f"{problem}; cursors are printable ASCII")
    return cursors


def _partition(value: str) -> int:
    number = int(value)
    if not 0 <= number <= MAX_PARTITION:
        raise ValueError(f"partitions are numbers from 0 to {MAX_PARTITION}")
    return number


def _partitions(value: str) -> frozenset[int]:
    chosen: set[int] = set()
    try:
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            chosen.update(
                range(_partition(first), _partition(last) + 1) if dash else [_partition(first)]
            )
    except ValueError:
        raise ValueError(
            f"must be numbers and ranges from 0 to {MAX_PARTITION}, such as 0,3,8-15"
        ) from None
    if not chosen:
        raise ValueError("holds an empty range")
    return frozenset(chosen)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}")
        return value.strip().lower()

    return parse


def _boolean(value: str) -> bool:
    return _one_of("true", "false")(value) == "true"


def _import_path(value: str) -> str:
    if not _IMPORT_PATH.fullmatch(value.strip()):
        raise ValueError("must be an import path such as package.module:function")
    return value.strip()


# ---------------------------------------------------------------------- all options


def _option(parse: Callable[[str], Any], **default: Any) -> Any:
    """Return the field of an option, which `parse` reads."""
    return field(metadata={"parse": parse}, **default)


def _limits(**values: Any) -> Limits:
    defaults: dict[str, Any] = dict(_SPARK_LIMITS)
    defaults["max_poll_interval"] = max(
        defaults["max_poll_interval"], values.get("poll_interval", 0)
    )
    return Limits(**{**defaults, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Validated options of a read or a stream.

    Picklable, because executors get it. It holds no secrets: see
    `feedapi_client.spark.http_clients`.
    """

    url: str = field(metadata={"parse": _url})
    """Of the feed."""
    feed_name: str | None = _option(_feed_name, default=None)
    """What a checkpoint knows the feed by, in place of its URL."""
    v1_partitions: int | None = _option(_integer(1, MAX_PARTITION + 1), default=None)
    start: Any = field(default="first", metadata={"parse": _start})
    ordered: bool = _option(_boolean, default=True)
    partitions: frozenset[int] | None = _option(_partitions, default=None)
    lineage: Mapping[int, int | None] = _option(parse_lineage, default_factory=dict)
    max_events_per_partition: int = _option(_integer(1), default=100_000)
    max_events_per_trigger: int | None = _option(_integer(1), default=None)
    fail_on_data_loss: bool = _option(_boolean, default=True)
    ending_cursors: Mapping[int, str] = _option(_cursors, default_factory=dict)
    """Where a batch read ends in some partitions."""
    max_bytes_per_trigger: int | None = _option(_integer(1), default=None)
    resume_run: str | None = _option(_text, default=None)
    """Run whose first plan says where a new query begins (see `stream.seed`)."""
    max_partitions_per_task: int | None = _option(_integer(1), default=None)
    staging_location: str | None = _option(_text, default=None)
    available_now_timeout: float = _option(_seconds, default=3600.0)
    bounded_polls: bool = True
    """Whether the longest poll interval grows with the number of idle partitions: only where option
    ``maxPollInterval`` is not given."""
    filters: Mapping[str, str] = field(default_factory=dict)
    fetch: FetchOptions = field(default_factory=FetchOptions)
    limits: Limits = field(default_factory=_limits)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    headers: Mapping[str, str] = field(default_factory=dict)
    header_env: Mapping[str, str] = field(default_factory=dict)
    auth_env: str | None = _option(_text, default=None)
    auth_callable: str | None = _option(_import_path, default=None)
    ca_file: str | None = _option(_text, default=None)
    """PEM file of the certificates that are trusted, on the driver and on each executor."""

    def __repr__(self) -> str:
        # Options end up in plans and logs. The URL's query and header values may be secrets.
        return f"<SourceOptions of {urlsplit(self.url).hostname}>"


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


_PARSERS: dict[type, dict[str, Callable[[str], Any]]] = {
    SourceOptions: {
        f.name: f.metadata["parse"] for f in fields(SourceOptions) if "parse" in f.metadata
    },
    FetchOptions: {
        "page_size_hint": _integer(1),
        "event_types": _names,
        "skip_event_types": _names,
        "v1_headers": _names,
    },
    Limits: {f.name: _of_field(f) for f in fields(Limits)},
    RetryPolicy: {f.name: _of_field(f) for f in fields(RetryPolicy) if f.name != "decide"},
}
"""For each object that options become, the parsers of its fields."""
_OPTIONS = {
    "startingCursors" if name == "start" else _camel(name): (kind, name, parse)
    for kind, parsers in _PARSERS.items()
    for name, parse in parsers.items()
}
_FAMILIES = ("filter.", "header.", "headerEnv.")

OPTION_NAMES = sorted([*_OPTIONS, *(f"{family}NAME" for family in _FAMILIES)])
"""All options, in the spelling of the documentation. Spark ignores the case of option names."""

_SPELLING = {name.lower(): name for name in OPTION_NAMES}


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Return the validated options of one read or stream.

    ``path`` (the argument of ``load``) means ``url``.

    Raises:
        OptionError: every problem, in one line. No value is quoted: it may be a secret. It is a
            `UrlOptionError`, and so a `NegotiationError`, when the URL is impossible.
    """
    problems: list[str] = []
    values: dict[type, dict[str, Any]] = {kind: {} for kind in _PARSERS}
    families: dict[str, dict[str, str]] = {family: {} for family in _FAMILIES}
    for option, value in given.items():
        name = "url" if option.lower() == "path" else option.lower()
        family = next(
            (f for f in _FAMILIES if name.startswith(f.lower()) and len(name) > len(f)), None
        )
        if family is not None:
            families[family][option[len(family) :]] = str(value)
        elif name not in _SPELLING:
            problems.append(_unknown(option))
        else:
            _parse(option, str(value), _SPELLING[name], values, problems)
    own = values[SourceOptions]
    problems += list(_problems(own, families["header."], problems))
    parts: list[Any] = []
    for kind, make in ((FetchOptions, FetchOptions), (Limits, _limits), (RetryPolicy, RetryPolicy)):
        try:
            parts.append(make(**values[kind]))
        except ValueError as error:
            problems.append(_in_option_names(str(error)))
    if problems:
        error_kind = UrlOptionError if any(p.endswith(_NO_URL) for p in problems) else OptionError
        raise error_kind(f"feedapi source: {'; '.join(problems)}")
    fetch, limits, retry = parts
    return SourceOptions(
        **own,
        bounded_polls="max_poll_interval" not in values[Limits],
        filters=families["filter."],
        fetch=fetch,
        limits=limits,
        retry=retry,
        headers=families["header."],
        header_env=families["headerEnv."],
    )


def _parse(
    option: str,
    value: str,
    name: str,
    values: dict[type, dict[str, Any]],
    problems: list[str],
) -> None:
    kind, target, parse = _OPTIONS[name]
    try:
        parsed = parse(value)
    except ValueError as error:
        problems.append(f"option {_spelling(option)} {error}")
        return
    if target == "url" and values[kind].get("url", parsed) != parsed:
        problems.append("option url and the path given to load() differ: give one of them")
    values[kind][target] = parsed


def _problems(
    own: Mapping[str, Any], headers: Iterable[str], problems: Iterable[str]
) -> Iterator[str]:
    if "url" not in own and not any("option url" in p or "option path" in p for p in problems):
        yield "option url is missing: the address of the feed"
    for name in filter(_SECRET.search, headers):
        yield (
            f"option header.{name} would put a secret into the query plan: name an environment "
            f"variable with headerEnv.{name} or authEnv, or give a function with authCallable"
        )
    if "auth_env" in own and "auth_callable" in own:
        yield "options authEnv and authCallable exclude each other: give one of them"


_ELSEWHERE = {
    "subscribe": "a feed is named by url, and its partitions by partitions",
    "subscribepattern": "a feed is named by url, and its partitions by partitions",
    "assign": "a feed is named by url, and its partitions by partitions",
    "minpartitions": "a task reads a group of partitions: see maxPartitionsPerTask",
    "maxoffsetspertrigger": "see maxEventsPerTrigger and maxEventsPerPartition",
    "minoffsetspertrigger": "give the query a processing-time trigger",
    "startingoffsets": "see startingCursors, which takes first, last or a JSON object of cursors",
    "startingoffsetsbytimestamp": "drop the rows before a time with where(...)",
    "endingoffsets": "see endingCursors, which takes a JSON object of cursors; a batch read ends "
    "where the feed ends when it starts",
    "endingoffsetsbytimestamp": "a read ends where the feed ends when it starts",
    "includeheaders": "column headers is always there",
    "groupidprefix": "a query keeps its place in its checkpoint, and has no consumer group",
}
"""Options of Spark's Kafka source, and what is here in their place."""

_BY_TIME = (
    "feeds can't be searched by time, so that all events were read: drop those before a time with "
    "where(...) on a time in column data"
)
_BY_TRIGGER = "a query without enough events waits: give it a longer processing-time trigger"
_A_COLUMN = '.withColumn("feed", lit(...))'
_GONE = {
    "startingtimestamp": _BY_TIME,
    "eventtime": _BY_TIME,
    "eventtimeunit": _BY_TIME,
    "missingeventtime": _BY_TIME,
    "mineventspertrigger": _BY_TRIGGER,
    "maxtriggerdelay": _BY_TRIGGER,
    "payload": "data is always text: select try_parse_json(data), and keep data where that is null",
    "urls": f"load each feed with url, and write union(...) of what you give {_A_COLUMN}",
    "feedcolumn": f"give the rows {_A_COLUMN}",
    "pushfilters": "option partitions chooses what is read",
    "previousurl": "feedName names a feed for its checkpoint, before it moves from URL to URL",
    "stream": "partitions are polled, at the latest each maxPollInterval",
    "maxrequestspersecond": "maxConcurrentFetches and maxPollInterval, and the publisher's 429",
    "forbiddenpayloads": (
        "such events are read, with the JSON as sent in column data; feedapi ingest rejects them"
    ),
    "fenced": "every streaming query is fenced at its staging location",
    "cacertificates": "caFile names a PEM file that the driver and all executors have",
}
"""Options of earlier versions, and what to write in their place."""


def _unknown(option: str) -> str:
    name = option.lower()
    if name in _GONE:
        return f"option {option} is gone: {_GONE[name]}"
    if name in _ELSEWHERE:
        return f"unknown option {option}, which is of the Kafka source: {_ELSEWHERE[name]}"
    if name.startswith("kafka."):
        return (
            f"unknown option {option}, which is of the Kafka source: a feed is read over HTTP; see "
            "authEnv, caFile and requestTimeout"
        )
    close = difflib.get_close_matches(name, _SPELLING, n=1)
    return f"unknown option {option}" + (f" (did you mean {_spelling(close[0])}?)" if close else "")


def _spelling(option: str) -> str:
    return _SPELLING.get(option.lower(), option)


def _in_option_names(message: str) -> str:
    """Return the message of an option object's ValueError with the names of Spark's options."""
    message = re.sub(_OPTION_OBJECT + r"(?:\.|: )", "", message)
    return "option " + re.sub(r"\b[a-z]+(?:_[a-z0-9]+)+\b", lambda m: _camel(m[0]), message)


def with_option_names(message: str) -> str:
    """Return an error's text that calls ``Limits.max_line_bytes`` ``option maxLineBytes``."""
    return re.sub(_OPTION_OBJECT + r"\.(\w+)", lambda m: f"option {_camel(m[1])}", message)
