"""HTTP: what is sent, what an answer means, and what stays secret.

The only package, beside adapters, that imports httpx. `transport` and `sync` do the I/O, `exchange`
holds what they share.
"""
