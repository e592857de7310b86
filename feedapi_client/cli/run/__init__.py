"""``feedapi run``: consume a feed with the application's handler."""
