"""Bad input of any kind is exit code 2 and one line, never a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from feedapi_client.cli.terminal import escape_json, shown
from feedapi_client.operations.opening import without_secrets
from tests.cli.conftest import Feedapi

# Each example runs a whole command. `python -m tests.fuzz import_file` goes on for longer.
FUZZ = settings(
    max_examples=min(100, settings().max_examples),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FEED: dict[str, Any] = {"url": "http://h/feed", "name": "n", "filters": {}, "positions": []}
ROW = {"partition": 0, "cursor": "c", "status": "open", "revision": 1}


def assert_usage_error(result: Any) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert_one_line(result)


def assert_one_line(result: Any) -> None:
    assert result.stderr.startswith("feedapi: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip("\n").isprintable()
    assert result.stdout == ""


# ---------------------------------------------------------------------- import files


def _export(**changes: Any) -> bytes:
    return orjson.dumps({"format": "feedapi-cursors/1", "feeds": [{**FEED, **changes}]})


ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40_000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@FUZZ
@given(st.binary(max_size=200))
@example(b"\xff\xfe")
@example(b"\x00")
@example(b"[" * 5000)
@example(b"[]")
@example(b"{}")
@example(b'{"format":"feedapi-cursors/1","feeds":[{}]}')
@example(b'{"format":"feedapi-cursors/1","feeds":[0]}')
@example(b'{"format":"feedapi-cursors/1","feeds":null}')
@example(_export(url="http://[::1/"))
@example(_export(url=None))
@example(_export(name=""))
@example(_export(name="a\0"))
@example(_export(filters=[1]))
@example(_export(filters={"a": None}))
@example(_export(positions=[ROW, ROW]))
@example(_export(positions=[{**ROW, "partition": True}]))
@example(_export(positions=[{**ROW, "partition": -1}]))
@example(_export(positions=[{**ROW, "cursor": ""}]))
@example(_export(positions=[{**ROW, "cursor": "a\x1b[2J"}]))
@example(_export(positions=[{**ROW, "cursor": "a\0"}]))
@example(_export(positions=[{**ROW, "cursor": "é"}]))
@example(_export(positions=[{**ROW, "cursor": "x" * 16_385}]))
@example(_export(positions=[{**ROW, "status": ["open"]}]))
@example(_export(positions=[{**ROW, "status": "lost"}]))
@example(_export(positions=[{**ROW, "partition": 70_000}]))
@example(_export(positions=[{**ROW, "cursor": "_last"}]))
def test_an_import_of_anything_else_is_a_usage_error(
    feedapi: Feedapi, tmp_path: Path, content: bytes
) -> None:
    source = tmp_path / "cursors.json"
    source.write_bytes(content)
    result = feedapi("cursors", "import", source, "--store", tmp_path / "none.db")
    assert_usage_error(result)
    assert "no export of cursors" in result.stderr
    assert not (tmp_path / "none.db").exists()


@pytest.mark.slow
@FUZZ
@given(st.sampled_from([*FEED, *ROW]), ODD_VALUES)
def test_an_export_with_another_value_is_imported_or_a_usage_error(
    feedapi: Feedapi, tmp_path: Path, field: str, value: Any
) -> None:
    source, store = tmp_path / "cursors.json", tmp_path / "cursors.db"
    changes = {field: value} if field in FEED else {"positions": [{**ROW, field: value}]}
    source.write_bytes(_export(**changes))
    result = feedapi("cursors", "import", source, "--store", store, "--yes")
    if result.exit_code != 0:
        assert_usage_error(result)


# ---------------------------------------------------------------------- what files hold is data


@pytest.mark.parametrize("text", ["\x1b[31mred", "\x9b2J", "\u202eevil", "a\u2028b", "\x7f"])
def test_r21_names_from_a_file_are_printed_escaped_once(
    feedapi: Feedapi, tmp_path: Path, text: str
) -> None:
    source, store = tmp_path / "cursors.json", tmp_path / "cursors.db"
    source.write_bytes(_export(name=text, filters={text: text}, positions=[ROW]))
    commands = [
        ("import", source, "--yes"),
        ("ls",),
        ("ls", "--json"),
        ("set", 0, "c"),
        ("export",),
        ("reset", "-p", 0, "--yes"),
    ]
    for command in commands:
        result = feedapi("cursors", *command, "--store", store)
        assert result.exit_code == 0, result.output
        assert all(line.isprintable() for line in re.split(r"[\n\t]", result.output))
        assert "\\\\" not in result.output


def test_r21_a_question_about_names_from_a_file_is_escaped(
    feedapi: Feedapi, tmp_path: Path
) -> None:
    source, store = tmp_path / "cursors.json", tmp_path / "cursors.db"
    source.write_bytes(_export(name="\x1b[31m", positions=[ROW]))
    feedapi("cursors", "import", source, "--store", store)
    result = feedapi("cursors", "reset", "--store", store, input="n\n")
    assert "\x1b" not in result.output
    assert "\\x1b[31m" in result.output


def test_r21_long_texts_are_cut(feedapi: Feedapi, tmp_path: Path) -> None:
    source, store = tmp_path / "cursors.json", tmp_path / "cursors.db"
    position = {**ROW, "cursor": "c" * 16_384}
    source.write_bytes(_export(name="n" * 1_000_000, positions=[position]))
    imported = feedapi("cursors", "import", source, "--store", store)
    listed = feedapi("cursors", "ls", "--store", store)
    assert (imported.exit_code, listed.exit_code) == (0, 0)
    assert len(imported.output) < 3_000
    assert listed.output.count("c") < 500


def test_an_escaped_text_means_the_same_json() -> None:
    value = {"\x7f\x9b": "é漢🎉\u202e", "b": ["\x1b", "\\"]}
    text = orjson.dumps(value).decode()
    for encoding in ("utf-8", "latin-1", None):
        escaped = escape_json(text, encoding)
        assert orjson.loads(escaped) == value
        assert escaped.isprintable()
        assert escaped.isascii() or encoding == "utf-8"


def test_a_text_is_escaped_once_and_cut() -> None:
    assert shown("two\nlines \x1b \u2028x \U000e0001") == "two lines \\x1b x \\U000e0001"
    assert shown(shown("\x1b")) == "\\x1b"
    assert shown("x" * 10**7) == "x" * 199 + "…"
    assert shown("\x1b" * 200) == "\\x1b" * 49 + "\\x1" + "…"


# ---------------------------------------------------------------------- store URLs


NO_STORES = [
    *("", " ", "a\nb", "://", "://secret", "nosuch://me:secret@localhost/db"),
    *("http://me:secret@localhost/feed", "postgresql://me:secret@[::1/db"),
    *("redis://me:secret@localhost:secret/0", "redis://me:secret@[::1/0"),
]
NOBODY_ANSWERS = [
    *("sqlite:///a?mode=secret&uri=secret", "postgresql://me:secret@host:secret/db"),
    *("postgresql+psycopg://me:sec?ret@host:99999999/db", "redis://me:secret@127.0.0.1:1/0"),
    *("postgresql+nosuch://me:secret@localhost/db", "redis://me:secret@localhost/0?nosuch=secret"),
    *("redis://me:secret@localhost/0?socket_timeout=secret", "unix://"),
    *("postgresql://me:secret@127.0.0.1:1/db?password=secret",),
    *("postgresql+psycopg2://me:secret@localhost/db",),
]


@pytest.mark.parametrize("spec", [*NO_STORES, *NOBODY_ANSWERS])
def test_r19_an_odd_store_url_is_reported_on_one_line(feedapi: Feedapi, spec: str) -> None:
    for group in ("cursors", "quarantine"):
        result = feedapi(group, "ls", "--store", spec)
        assert result.exit_code in (1, 2), (result.output, result.exception)
        assert result.exit_code == 2 or spec not in NO_STORES or group == "quarantine"
        assert_one_line(result)
        assert "secret" not in result.output
        assert "sec?ret" not in result.output


@FUZZ
@given(
    st.sampled_from(["redis", "postgresql", "sqlite", "mysql+asyncmy", "x", "rediss", ""]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0/"), max_size=20),
)
def test_any_store_url_is_reported_on_one_line(
    feedapi: Feedapi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, rest: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # To a port where nobody answers: an address of its own could be anybody's.
    spec = f"{scheme}://u:p@127.0.0.1:1/{rest}"
    result = feedapi("cursors", "ls", "--store", spec)
    assert result.exit_code in (1, 2), (result.output, result.exception)
    assert_one_line(result)


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("postgresql://me:pw@host:5/db?x=pw#pw", "postgresql://host:5/db"),
        ("postgresql://me:p/w@host/db", "postgresql://host/db"),
        ("postgresql://me:p@w@host/db", "postgresql://host/db"),
        ("postgresql://me:p?w@host/db", "postgresql://…"),
        ("postgresql://host/db?x=p@w", "postgresql://…"),
        ("redis://host", "redis://host"),
    ],
)
def test_r19_a_database_url_without_its_secrets(url: str, public: str) -> None:
    assert without_secrets(url) == public


# ---------------------------------------------------------------------- times


@FUZZ
@given(
    st.text(max_size=20)
    | st.from_regex(r"[0-9]{1,400}(\.[0-9]+)? ?(s|min|hours|days|weeks) ago", fullmatch=True)
    | st.from_regex(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", fullmatch=True)
    | st.from_regex(r"(0001|9999)-(01-01|12-31)(T[0-2][0-9]:00)?([+-]1[0-9]:00)?", fullmatch=True)
)
@example("99999999999999 weeks ago")
@example("9" * 400 + " s ago")
@example("0001-01-01")
@example("9999-12-31T23:59:59")
@example("0001-01-01T00:00:00+14:00")
@example("9999-12-31T23:59:59-14:00")
@example("25:61")
@example("\x1b[2J ago")
def test_any_time_is_understood_or_a_usage_error(
    feedapi: Feedapi, tmp_path: Path, text: str
) -> None:
    result = feedapi("cursors", "rewind", f"--to={text}", "--store", tmp_path / "none.db")
    assert result.exit_code in (1, 2), (result.output, result.exception)
    assert_one_line(result)
    assert result.exit_code == 2 or "there is no such file" in result.stderr


# ---------------------------------------------------------------------- feed URLs


IMPOSSIBLE_URLS = [
    "",
    "localhost/feed",
    "ftp://h/feed",
    "http://",
    "http:///feed",
    "http://[::1/feed",
    "http://[x]/feed",
    "http://h:secret/feed",
    "http://h:99999999/feed",
    "http://me:secret@/feed",
    "http://a b/feed",
    "http://h/\x1b[2J",
    "http://xn--\ud800/feed",
    "http://" + "a" * 70_000 + "/feed",
]


@pytest.mark.parametrize("url", IMPOSSIBLE_URLS)
def test_r19_an_impossible_feed_url_is_a_usage_error(
    feedapi: Feedapi, tmp_path: Path, url: str
) -> None:
    store = tmp_path / "cursors.db"
    for words in (["discover"], ["cat"], ["cursors", "ls", "--store", store, "--lag"]):
        result = feedapi(*words, url)
        assert_usage_error(result)
        assert "secret" not in result.output
    assert not store.exists()


@pytest.mark.parametrize(
    "words",
    [
        "discover http://h/feed https://u:sesame@h/feed?k=sesame",
        "cursors ls postgresql+psycopg://u:sesame@h/db",
        "http://u:sesame@h/feed",
    ],
)
def test_r19_a_url_in_the_wrong_place_is_not_quoted(feedapi: Feedapi, words: str) -> None:
    result = feedapi(*words.split())
    assert_usage_error(result)
    assert "sesame" not in result.stderr
