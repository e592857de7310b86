"""``feedapi demo``: run publisher and consumer, and prove exactly-once delivery."""
