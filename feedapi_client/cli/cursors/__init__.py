"""``feedapi cursors``: show and repair stored cursors."""
