"""Where cursors are kept."""

from feedapi_client.stores.base import CursorStore

__all__ = ["CursorStore"]
