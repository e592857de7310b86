"""``feedapi quarantine``: show, replay and drop quarantined events."""
