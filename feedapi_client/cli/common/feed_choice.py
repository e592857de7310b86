"""Choose among the feeds of a store by ``--feed``, ``--name`` and ``--filter``."""

from __future__ import annotations

from dataclasses import dataclass

from feedapi_client.cli.common.feed_url import checked_url
from feedapi_client.cli.common.fetch_options import fetch_options
from feedapi_client.model import FeedKey


@dataclass(frozen=True, slots=True)
class FeedChoice:
    """Which feeds of a store are meant.

    `feed` is a URL or a part of one, `name` the name of a consumer, and `filters` are NAME=VALUE.
    What is None chooses all.
    """

    feed: str | None = None
    name: str | None = None
    filters: list[str] | None = None

    def __bool__(self) -> bool:
        """Whether a feed or a name is given."""
        return bool(self.feed or self.name)

    def matches(self, key: FeedKey) -> bool:
        """Whether the key is chosen."""
        if self.name is not None and key.name != self.name:
            return False
        if self.filters is not None and key.filters != self._selection():
            return False
        return self.feed is None or self.feed in key.url or _key_url(self.feed) == key.url

    def exact_key(self) -> FeedKey | None:
        """Return the key that a complete URL names, whether or not a store has positions of it.

        Raises `typer.BadParameter` for a URL that no feed can have.
        """
        if self.feed is None or not _is_url(self.feed):
            return None
        url = checked_url(self.feed, "--feed")
        return FeedKey(url, self.name or "default", self._selection())

    def _selection(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(fetch_options(self.filters).selection().items()))


def _is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def _key_url(text: str) -> str | None:
    try:
        return FeedKey(text).url if _is_url(text) else None
    except ValueError:
        return None
