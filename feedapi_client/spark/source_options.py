"""The options of ``format("feedapi")``: strings in, checked values out. Imports no Spark."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from feedapi_client.arguments import parse_lineage
from feedapi_client.errors import NegotiationError
from feedapi_client.http.urls import FeedURL
from feedapi_client.model import MAX_PARTITION, checked_feed_name
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.text import MAX_CURSOR

Text = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Boolean = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a whole number from 1 to 2^63 - 1")]
# An Arrow batch holds 2 GiB of text, and may be larger than `max_batch_bytes` by what comes last.
Size = Annotated[int, Meta(ge=1, le=2**30, description="a whole number from 1 to 2^30")]
# What clocks and timers take.
Seconds = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds from 0 to 1e9")]
Names = Annotated[tuple[str, ...], Meta(min_length=1, description="names, separated by ';' or ','")]
ImportPath = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
        description="an import path such as package.module:function",
    ),
]
Partition = Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
Partitions = Annotated[
    frozenset[Partition],
    Meta(
        min_length=1,
        description=f"numbers and ranges from 0 to {MAX_PARTITION}, such as 0,3,8-15",
    ),
]
V1Partitions = Annotated[
    int, Meta(ge=1, le=MAX_PARTITION + 1, description=f"a number from 1 to {MAX_PARTITION + 1}")
]
_CURSORS = 'a JSON object of partition to cursor, of printable ASCII, such as {"0": "abc"}'
Cursor = Annotated[str, Meta(min_length=1, max_length=MAX_CURSOR, pattern="^[ -~]+$")]
Cursors = Annotated[dict[Partition, Cursor], Meta(description=_CURSORS)]
Start = Annotated[
    Literal["first", "last"] | Cursors, Meta(description=f"first, last, or {_CURSORS}")
]

_LIMITS = Limits(
    max_poll_interval=2.0,
    max_batch_bytes=4 * 1024 * 1024,
    slot_timeout=Limits().request_timeout,  # a trickle is worth no more than silence
)
_RETRY = RetryPolicy()


class OptionError(ValueError):
    """An option is unknown, missing or wrong. Its one line names every such option."""


class UrlOptionError(NegotiationError, OptionError):
    """Option `url` can't be the URL of a feed, whatever else is wrong."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", dict=True):
    """Validated options of a read or a stream.

    Picklable, because executors get it. It holds no secrets, but where
    they are. The fields in camel case are the names of the options, but for three families.
    """

    url: str
    feed_name: str | None = None
    """What a checkpoint knows the feed by, in place of its URL."""
    starting_cursors: Start = "first"
    ending_cursors: Cursors = {}
    """Where a batch read ends in some partitions."""
    partitions: Partitions | None = None
    lineage: dict[Partition, Partition | None] = {}
    ordered: Boolean = True
    v1_partitions: V1Partitions | None = None
    fail_on_data_loss: Boolean = True
    resume_run: Text | None = None
    """Run whose first plan says where a new query begins (see `stream.seed`)."""
    staging_location: Text | None = None
    # The size of an epoch, and of a task.
    max_events_per_partition: Count = 100_000
    max_events_per_trigger: Count | None = None
    max_bytes_per_trigger: Count | None = None
    max_partitions_per_task: Count | None = None
    available_now_timeout: Seconds = 3600.0
    # Of `FetchOptions`.
    page_size_hint: Count | None = None
    event_types: Names | None = None
    skip_event_types: Names | None = None
    v1_headers: Names | None = None
    filters: dict[str, str] = {}
    # Of `Limits`.
    max_concurrent_fetches: Count = _LIMITS.max_concurrent_fetches
    max_buffered_bytes: Count = _LIMITS.max_buffered_bytes
    max_batch_bytes: Size = _LIMITS.max_batch_bytes
    max_line_bytes: Size = _LIMITS.max_line_bytes
    max_discovery_bytes: Count = _LIMITS.max_discovery_bytes
    poll_interval: Seconds = _LIMITS.poll_interval
    max_poll_interval: Seconds | None = None
    """None: 2 s, and longer with the number of idle partitions."""
    settle_time: Seconds = _LIMITS.settle_time
    discovery_interval: Seconds = _LIMITS.discovery_interval
    request_timeout: Seconds = _LIMITS.request_timeout
    slot_timeout: Seconds = _LIMITS.slot_timeout
    max_attempts_without_progress: Count = _LIMITS.max_attempts_without_progress
    # Of `RetryPolicy`.
    base_delay: Seconds = _RETRY.base_delay
    max_delay: Seconds = _RETRY.max_delay
    max_retry_after: Seconds = _RETRY.max_retry_after
    give_up_after: Seconds | None = _RETRY.give_up_after
    refused_for: Seconds = _RETRY.refused_for
    # What requests carry.
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    auth_env: Text | None = None
    auth_callable: ImportPath | None = None
    ca_file: Text | None = None
    """PEM file of the certificates that are trusted, on the driver and on each executor."""

    @cached_property
    def fetch(self) -> FetchOptions:
        """What is asked for, with the filters as they are written here."""
        names = ("event_types", "skip_event_types", "v1_headers")
        given: dict[str, Any] = {name: getattr(self, name) or () for name in names}
        return FetchOptions(page_size_hint=self.page_size_hint, filters=self.filters, **given)

    @cached_property
    def limits(self) -> Limits:
        """How much is used. What has no option keeps its default."""
        given = _common(self, Limits)
        if self.max_poll_interval is None:
            given["max_poll_interval"] = max(_LIMITS.max_poll_interval, self.poll_interval)
        return Limits(**given)

    @cached_property
    def retry(self) -> RetryPolicy:
        """How often a request is repeated."""
        return RetryPolicy(**_common(self, RetryPolicy))

    def __repr__(self) -> str:
        # Options end up in plans and logs. The URL's query and header values may be secrets.
        return f"<SourceOptions of {urlsplit(self.url).hostname}>"


def _common(options: SourceOptions, kind: type[Limits | RetryPolicy]) -> dict[str, Any]:
    own = SourceOptions.__struct_fields__
    return {f.name: getattr(options, f.name) for f in fields(kind) if f.name in own}


_FAMILIES = {"filter.": "filters", "header.": "headers", "headerEnv.": "header_env"}
_OPTIONS: dict[str, FieldInfo] = {
    info.encode_name: info
    for info in msgspec.structs.fields(SourceOptions)
    if info.name not in _FAMILIES.values()
}

OPTION_NAMES = sorted([*_OPTIONS, *(f"{family}NAME" for family in _FAMILIES)])
"""All options, in the spelling of the documentation. Spark ignores the case of option names."""

_SPELLING = {name.lower(): name for name in OPTION_NAMES}


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Raises `OptionError` with every problem, in one line. It quotes no value: a secret, maybe."""
    if "provider" in given:  # a property that Spark gives to a table of its catalog
        raise OptionError(
            "feedapi source: Spark reads a table of a catalog without its options: in place of "
            "CREATE TABLE write CREATE TEMPORARY VIEW name USING feedapi OPTIONS (url '...')"
        )
    problems: list[str] = []
    values: dict[str, Any] = {}
    families: dict[str, Any] = {field: {} for field in _FAMILIES.values()}
    for option, value in given.items():
        name = "url" if option.lower() == "path" else option.lower()
        family = next(
            (f for f in _FAMILIES if name.startswith(f.lower()) and name != f.lower()), None
        )
        if family is not None:
            families[_FAMILIES[family]][option[len(family) :]] = str(value)
        elif name in _SPELLING:
            shown = option if option.lower() == "path" else _SPELLING[name]  # Spark ignores case
            _add(shown, str(value).strip(), _OPTIONS[_SPELLING[name]], values, problems)
        else:
            problems.append(_unknown(option))
    problems += _contradictions(values, families["headers"])
    if "url" not in values and not any(" url " in one or " path " in one for one in problems):
        problems.append("option url is missing: the address of the feed")
    options = SourceOptions(**{"url": "", **values}, **families)
    for part in ("fetch", "limits", "retry"):
        try:
            getattr(options, part)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        kind = UrlOptionError if any(one.endswith(_NO_URL) for one in problems) else OptionError
        raise kind(f"feedapi source: {'; '.join(problems)}")
    return options


def _add(
    option: str, text: str, field: FieldInfo, values: dict[str, Any], problems: list[str]
) -> None:
    try:
        read = _READERS.get(field.name, str)
        value = msgspec.convert(read(text), field.type, strict=False)
    except ValueError as error:
        described = _description(field.type)
        problems.append(f"option {option} {f'must be {described}' if described else error}")
        return
    if field.name == "url" and values.get("url", value) != value:
        problems.append("option url and the path given to load() differ: give one of them")
    values[field.name] = value


def _description(kind: Any) -> str | None:
    for part in (kind, *get_args(kind)):
        for meta in getattr(part, "__metadata__", ()):
            return meta.description  # type: ignore[no-any-return]
    return None


# ---------------------------------------------------------------------- texts that need reading

_NO_URL = "must be an http or https URL"


def _url(text: str) -> str:
    try:
        credentials = FeedURL.parse(text).basic_auth
    except NegotiationError:
        raise ValueError(_NO_URL) from None
    if credentials:
        raise ValueError(
            "must not hold credentials, which would show in query plans: use authEnv or "
            "authCallable"
        )
    return text


def _cursors(text: str) -> Cursors:
    cursors = msgspec.json.decode(text, type=Cursors)
    if not cursors:
        raise ValueError("without a partition")
    return cursors


def _start(text: str) -> str | Cursors:
    return text.lower() if text.lower() in ("first", "last") else _cursors(text)


def _partitions(text: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        end = min(int(last), MAX_PARTITION + 1) if dash else int(first)
        chosen.update(range(int(first), end + 1))
    return chosen


def _names(text: str) -> list[str]:
    return [name.strip() for name in re.split("[;,]", text) if name.strip()]


def _feed_name(text: str) -> str:
    try:
        return checked_feed_name(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("feed_name ")) from None


_READERS: dict[str, Callable[[str], Any]] = {
    "url": _url,
    "feed_name": _feed_name,
    "starting_cursors": _start,
    "ending_cursors": _cursors,
    "partitions": _partitions,
    "lineage": parse_lineage,
    "event_types": _names,
    "skip_event_types": _names,
    "v1_headers": _names,
    "give_up_after": lambda text: None if text.lower() == "none" else text,
}
"""What makes a value of the text, where `msgspec.convert` can't. Each raises ValueError, with what
follows the name of the option in a sentence where the field's type has no description."""

# ---------------------------------------------------------------------- what is refused

_SECRET = re.compile("auth|cookie|key|token|secret|passw|credential|signature", re.IGNORECASE)


def _contradictions(values: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[str]:
    for name in filter(_SECRET.search, headers):
        yield (
            f"option header.{name} would put a secret into the query plan: name an environment "
            f"variable with headerEnv.{name} or authEnv, or give a function with authCallable"
        )
    if "auth_env" in values and "auth_callable" in values:
        yield "options authEnv and authCallable exclude each other: give one of them"


def _unknown(option: str) -> str:
    close = difflib.get_close_matches(option.lower(), _SPELLING, n=1)
    return f"unknown option {option}" + (f" (did you mean {_SPELLING[close[0]]}?)" if close else "")
