"""Consumer library for FeedAPI: a partitioned event feed over plain HTTP, every event in order and once."""
