"""``feedapi leases``."""
