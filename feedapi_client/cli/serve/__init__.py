"""``feedapi serve``: serve an example feed."""
