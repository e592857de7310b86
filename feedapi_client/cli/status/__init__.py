"""``feedapi status``: what a consumer does now."""
