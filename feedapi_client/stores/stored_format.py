"""The version of what a store holds.

A database has the table ``feedapi_format``, with a row for each table of cursors (which counts for
its journal, instances and leases, too) and of quarantined events. Without a row the version is 1.
`docs/pages/formats.md` has the formats.
"""

# ruff: noqa: S608 - the statements are made of quoted names

from __future__ import annotations

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.protocol.text import printable
from feedapi_client.stores.scripts import Query, Script

STORE_FORMAT = 1
"""The version of cursors, journal, instances and leases, in every kind of store."""
QUARANTINE_FORMAT = 1
"""The version of quarantined events."""
FORMAT_TABLE = "feedapi_format"
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


def check_noted(table: str, name: str, newest: int) -> Script[bool]:
    """Check the noted format of a table, and return whether there is a note.

    Arguments:
        table: where it is noted, quoted.
        name: of the table whose format it is.
        newest: the newest version of it that can be read.

    Raises:
        StoreError: a newer version of this package wrote it.
    """
    rows = yield Query(f"SELECT version FROM {table} WHERE name = ?", (name,))
    check_format(f"the table {name}", rows[0][0] if rows else None, newest)
    return bool(rows)


def note_format(table: str, name: str, newest: int) -> Script[None]:
    """Check the format of a table as `check_noted` does, and note it where it is not noted yet."""
    if not (yield from check_noted(table, name, newest)):
        yield Query(f"INSERT INTO {table} (name, version) VALUES (?, ?)", (name, newest))


def in_another_format(key: FeedKey) -> StoreError:
    """Return the error of a consumer whose positions are stored under a key of another format."""
    return StoreError(
        f"the store holds positions of the consumer '{printable(key.name, _MAX_SHOWN)}' under a "
        "key that this version does not know: a newer version of feedapi-client wrote it, or one "
        "of before the first release. Use that version, or take another name to begin anew",
        feed=key.url,
    )
