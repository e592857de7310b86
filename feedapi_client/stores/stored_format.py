"""The version of what a store holds.

A database has the table ``feedapi_format``, with a row for each table of cursors (which counts for
its journal, instances and leases, too) and of quarantined events. Without a row the version is 1.
`docs/pages/formats.md` has the formats.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

from collections.abc import Callable, Sequence

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.protocol.text import printable
from feedapi_client.stores.scripts import Query, Script

STORE_FORMAT = 1
"""The version of cursors, journal, instances and leases, in every kind of store."""
QUARANTINE_FORMAT = 1
"""The version of quarantined events."""
FORMAT_TABLE = "feedapi_format"
CREATE_FORMAT = f"""
CREATE TABLE IF NOT EXISTS {FORMAT_TABLE} (
    name VARCHAR(200) NOT NULL PRIMARY KEY,
    version INTEGER NOT NULL
)
"""
_SELECT = f"SELECT version FROM {FORMAT_TABLE} WHERE name = ?"
_INSERT = f"INSERT OR IGNORE INTO {FORMAT_TABLE} (name, version) VALUES (?, ?)"
_MAX_SHOWN = 200


def check_format(what: str, found: int | None, newest: int, feed: FeedKey | None = None) -> None:
    """Check that this version can read what another one wrote.

    Arguments:
        what: what it is, and where, for the message.
        found: the stored version; None where there is none, which is 1.
        newest: the newest version that can be read.

    Raises:
        StoreError: a newer version of this package wrote it.
    """
    if found is not None and found > newest:
        raise StoreError(
            f"a newer version of feedapi-client wrote {what} (format {found}, this one reads up "
            f"to {newest}): update feedapi-client here",
            feed=None if feed is None else feed.url,
        )


def note_format(name: str, newest: int) -> Script[None]:
    """Check the format of a table in a SQLite file, and note it where it is not noted yet.

    Raises:
        StoreError: a newer version of this package wrote it.
    """
    yield Query(CREATE_FORMAT)
    rows = yield Query(_SELECT, (name,))
    check_format(f"the table {name}", rows[0][0] if rows else None, newest)
    if not rows:
        yield Query(_INSERT, (name, newest))


def quoted(name: str, schema: str | None = None) -> str:
    """Return a table's name as an identifier of SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part)


def named(table: str, schema: str | None) -> Callable[[str], str]:
    """Return what `PositionScripts` takes."""
    return lambda suffix: quoted(f"{table}{suffix}", schema)


class FormatTable:
    """The table that notes the formats of other tables, and the statements on it.

    Arguments:
        name, schema: of the table whose format is noted.
        newest: the newest version of it that can be read.
    """

    def __init__(self, name: str, schema: str | None, newest: int) -> None:
        self._name = name
        self._newest = newest
        self._table = table = quoted(FORMAT_TABLE, schema)
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} "
            "(name VARCHAR(200) NOT NULL PRIMARY KEY, version INTEGER NOT NULL)"
        )
        self._insert = (
            f"INSERT INTO {table} (name, version) VALUES ($1::varchar, $2::integer) "
            "ON CONFLICT DO NOTHING"
        )
        self._select = f"SELECT version FROM {table} WHERE name = $1::varchar"

    def create(self, tables: Sequence[str], create: Script[None]) -> Script[None]:
        """Create the tables if one does not exist yet, and note their format if it is not noted.

        PostgreSQL asks a role for the right to create a table although it exists.

        Arguments:
            tables: their quoted names.
            create: creates them where they do not exist.
        """
        names = [self._table, *tables]
        exist = "SELECT count(to_regclass(name)) FROM unnest($1::text[]) AS names (name)"
        if (yield Query(exist, (names,)))[0][0] < len(names):
            yield Query(self._create)
            yield from create
        if not (yield Query(self._select, (self._name,))):
            yield Query(self._insert, (self._name, self._newest))
        yield from self.check()

    def check(self) -> Script[None]:
        """Check the format. Without the table it is the first one.

        Raises:
            StoreError: a newer version of this package wrote the table.
        """
        rows = yield Query("SELECT to_regclass($1::text) IS NOT NULL", (self._table,))
        if rows[0][0]:
            rows = yield Query(self._select, (self._name,))
            check_format(f"the table {self._name}", rows[0][0] if rows else None, self._newest)


def in_another_format(key: FeedKey) -> StoreError:
    """Return the error of a consumer whose positions are stored under a key of another format."""
    return StoreError(
        f"the store holds positions of the consumer '{printable(key.name, _MAX_SHOWN)}' under a "
        "key that this version does not know: was it written by a newer version of "
        "feedapi-client? Update feedapi-client here, or take another name to begin anew",
        feed=key.url,
    )
