"""Several instances of one consumer divide the partitions of a feed.

`assignment` is pure and decides who reads what; `coordinator` keeps the leases of one instance.
The leases are kept by the cursor store, see `feedapi_client.stores.leases`.
"""
