"""How a fetch looks in each dialect."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from feedapi_client.errors import ProtocolError
from feedapi_client.model import DialectName, FeedInfo, Partition
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.dialects import DIALECTS, check_options


def info(dialect: DialectName, **more: Any) -> FeedInfo:
    return FeedInfo(
        dialect,
        {id: Partition(id) for id in range(4)},
        token="tok" if dialect == "v2-token" else None,
        **more,
    )


FILTERS = FetchOptions(filters={"subject": "a b"})
BY_TYPE = FetchOptions(event_types=["a", "b"])
BUT_TYPE = FetchOptions(skip_event_types=["c"])
HEADERS = FetchOptions(v1_headers=["a", "b"])
PAGES = FetchOptions(page_size_hint=50)


@pytest.mark.parametrize(
    ("dialect", "options", "stream", "query"),
    [
        ("v1", None, False, "n=4 cursor2=abc"),
        ("v2-draft", None, False, "partition=2 cursor=abc"),
        ("v2-token", None, False, "token=tok partition=2 cursor=abc"),
        ("v1", PAGES, False, "n=4 cursor2=abc pagesizehint=50"),
        ("v2-draft", PAGES, False, "partition=2 cursor=abc pageSizeHint=50"),
        ("v2-token", PAGES, False, "token=tok partition=2 cursor=abc pagesizehint=50"),
        ("v1", HEADERS, False, "n=4 cursor2=abc headers=a,b"),
        ("v2-draft", HEADERS, False, "partition=2 cursor=abc"),
        ("v2-token", HEADERS, False, "token=tok partition=2 cursor=abc"),
        ("v2-draft", FILTERS, False, "partition=2 cursor=abc filter-subject=a+b"),
        ("v2-token", BY_TYPE, False, "token=tok partition=2 cursor=abc event-types=a;b"),
        ("v2-token", BUT_TYPE, False, "token=tok partition=2 cursor=abc skip-event-types=c"),
        ("v2-draft", None, True, "partition=2 cursor=abc stream=y"),
        ("v2-draft", PAGES, 5000, "partition=2 cursor=abc stream=5000"),
        ("v2-draft", None, 1, "partition=2 cursor=abc stream=1"),
        ("v1", None, True, "n=4 cursor2=abc"),
        ("v2-token", None, True, "token=tok partition=2 cursor=abc"),
    ],
)
def test_how_a_fetch_looks(
    dialect: DialectName, options: FetchOptions | None, stream: bool | int, query: str
) -> None:
    row, found = DIALECTS[dialect], info(dialect, stream=dialect == "v2-draft")
    params = row.fetch_params(found, 2, "abc", options or FetchOptions(), stream=stream)
    assert " ".join(f"{name}={value.replace(' ', '+')}" for name, value in params) == query
    assert row.name == dialect
    assert row.suffix == ("/events" if dialect == "v2-token" else "")


NO_TYPES = r"event_types need a feed of dialect v2-token\. It speaks "
NO_FILTERS = r"^feed F: filters need a feed of dialect v2-draft\. It speaks "
UNKNOWN = r"does not offer filter 'colour'\. It speaks v2-draft, with filters subject, size"


@pytest.mark.parametrize(
    ("dialect", "options", "says"),
    [
        *((dialect, by, NO_TYPES) for dialect in ("v1", "v2-draft") for by in (BY_TYPE, BUT_TYPE)),
        *((dialect, FILTERS, NO_FILTERS) for dialect in ("v1", "v2-token")),
        ("v2-draft", FetchOptions(filters={"colour": "a", "size": "b"}), UNKNOWN),
        ("v1", FetchOptions(page_size_hint=5, v1_headers=["a"]), None),
        ("v2-draft", FetchOptions(filters={"subject": "a"}, v1_headers=["a"]), None),
        ("v2-token", FetchOptions(event_types=["a"], v1_headers=["a"]), None),
        ("v2-token", FetchOptions(stream=True), None),
    ],
)
def test_a_selection_that_can_not_be_asked_for_is_refused(
    dialect: DialectName, options: FetchOptions, says: str | None
) -> None:
    feed = info(dialect, filters=("subject", "size") if dialect == "v2-draft" else ())
    with nullcontext() if says is None else pytest.raises(ProtocolError, match=says):
        check_options(feed, options, feed="F")


def test_r21_the_names_of_filters_are_escaped_and_cut_in_messages() -> None:
    names = ("\x1b[31m" + "x" * 20_000_000, *(f"f{n}" for n in range(10_000)))
    info = FeedInfo("v2-draft", {}, filters=names)
    with pytest.raises(ProtocolError) as caught:
        check_options(info, FetchOptions(filters={"a\x00" * 1000: "1"}), feed="F")
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
