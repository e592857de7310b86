"""One iteration over a feed, on asyncio or trio: partitions scheduled, fetched, delivered and committed."""
