"""How a fetch looks in each dialect."""

from __future__ import annotations

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


def params(
    dialect: DialectName,
    options: FetchOptions | None = None,
    stream: bool | int = False,
    **more: Any,
) -> list[tuple[str, str]]:
    return DIALECTS[dialect].fetch_params(
        info(dialect, **more), 2, "abc", options or FetchOptions(), stream=stream
    )


def test_every_dialect_has_its_row() -> None:
    assert {name: row.name for name, row in DIALECTS.items()} == {
        "v1": "v1",
        "v2-draft": "v2-draft",
        "v2-token": "v2-token",
    }
    assert [row.suffix for row in DIALECTS.values()] == ["", "", "/events"]


@pytest.mark.parametrize(
    ("dialect", "query"),
    [
        ("v1", [("n", "4"), ("cursor2", "abc")]),
        ("v2-draft", [("partition", "2"), ("cursor", "abc")]),
        ("v2-token", [("token", "tok"), ("partition", "2"), ("cursor", "abc")]),
    ],
)
def test_a_fetch_names_one_partition_and_its_cursor(
    dialect: DialectName, query: list[tuple[str, str]]
) -> None:
    assert params(dialect) == query


@pytest.mark.parametrize(
    ("dialect", "name"),
    [("v1", "pagesizehint"), ("v2-draft", "pageSizeHint"), ("v2-token", "pagesizehint")],
)
def test_each_dialect_spells_the_page_size_its_way(dialect: DialectName, name: str) -> None:
    assert params(dialect, FetchOptions(page_size_hint=50))[-1] == (name, "50")


def test_v1_asks_for_headers() -> None:
    assert params("v1", FetchOptions(v1_headers=["a", "b"]))[-1] == ("headers", "a,b")


@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
def test_v2_has_no_headers_to_ask_for(dialect: DialectName) -> None:
    assert params(dialect, FetchOptions(v1_headers=["_all"])) == params(dialect)


def test_the_draft_carries_filters() -> None:
    assert params("v2-draft", FetchOptions(filters={"subject": "a b"}))[-1] == (
        "filter-subject",
        "a b",
    )


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        (FetchOptions(event_types=["a", "b"]), ("event-types", "a;b")),
        (FetchOptions(skip_event_types=["c"]), ("skip-event-types", "c")),
    ],
)
def test_the_published_dialect_carries_event_types(
    options: FetchOptions, pair: tuple[str, str]
) -> None:
    assert params("v2-token", options)[-1] == pair


@pytest.mark.parametrize(("stream", "value"), [(True, "y"), (5000, "5000"), (1, "1")])
def test_a_stream_is_asked_for_where_the_feed_offers_it(stream: bool | int, value: str) -> None:
    query = DIALECTS["v2-draft"].fetch_params(
        info("v2-draft", stream=True), 2, "abc", FetchOptions(), stream=stream
    )
    assert query[-1] == ("stream", value)


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
def test_a_page_is_asked_for_where_the_feed_offers_no_stream(dialect: DialectName) -> None:
    assert params(dialect, stream=True) == params(dialect)


def test_a_stream_has_no_page_size() -> None:
    query = DIALECTS["v2-draft"].fetch_params(
        info("v2-draft", stream=True), 2, "abc", FetchOptions(page_size_hint=5), stream=True
    )
    assert "pageSizeHint" not in dict(query)


@pytest.mark.parametrize("dialect", ["v1", "v2-draft"])
@pytest.mark.parametrize(
    "options", [FetchOptions(event_types=["a"]), FetchOptions(skip_event_types=["a"])]
)
def test_event_types_are_refused_where_they_can_not_be_asked_for(
    dialect: DialectName, options: FetchOptions
) -> None:
    with pytest.raises(
        ProtocolError,
        match=r"^feed F: event_types and skip_event_types need a feed of dialect v2-token, "
        r"this one speaks",
    ):
        check_options(info(dialect, filters=("subject",)), options, feed="F")


@pytest.mark.parametrize("dialect", ["v1", "v2-token"])
def test_filters_are_refused_where_they_can_not_be_asked_for(dialect: DialectName) -> None:
    with pytest.raises(
        ProtocolError, match=r"^feed F: filters need a feed of dialect v2-draft, this one speaks"
    ):
        check_options(info(dialect), FetchOptions(filters={"subject": "a"}), feed="F")


def test_a_filter_that_the_feed_does_not_offer_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match="does not offer filter 'colour'; it offers: subject, size"
    ):
        check_options(
            info("v2-draft", filters=("subject", "size")),
            FetchOptions(filters={"colour": "a", "size": "b"}),
            feed="F",
        )


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        ("v1", FetchOptions(page_size_hint=5, v1_headers=["a"])),
        ("v2-draft", FetchOptions(filters={"subject": "a"}, v1_headers=["a"])),
        ("v2-token", FetchOptions(event_types=["a"], v1_headers=["a"])),
        ("v2-token", FetchOptions(stream=True)),
    ],
)
def test_what_can_be_carried_or_selects_no_events_is_fine(
    dialect: DialectName, options: FetchOptions
) -> None:
    check_options(info(dialect, filters=("subject",)), options, feed="F")


def test_r21_the_names_of_filters_are_escaped_and_cut_in_messages() -> None:
    names = ("\x1b[31m" + "x" * 20_000_000, *(f"f{n}" for n in range(10_000)))
    info = FeedInfo("v2-draft", {}, filters=names)
    with pytest.raises(ProtocolError) as caught:
        check_options(info, FetchOptions(filters={"a\x00" * 1000: "1"}), feed="F")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert "and others" in str(caught.value)
