"""HTTP: requests, the classification of responses, and redaction of secrets.

The only package, beside adapters, that imports httpx. `async_transport` and `sync_transport` do the
I/O, `exchange` holds what they share.
"""
