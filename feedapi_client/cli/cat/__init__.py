"""``feedapi cat``: print the events of a feed."""
