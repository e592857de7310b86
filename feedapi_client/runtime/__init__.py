"""One iteration over a feed, on asyncio or trio: schedule, fetch, deliver and commit."""
